"""What people touch: the command line, the gateway, the client; and the controller that keeps workers alive."""

assert __name__ == "baton.deploy", "import baton.deploy, not deploy: a bare import makes a second copy"
