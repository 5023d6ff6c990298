"""Which workers a request is sent to: what a gateway knows of them (`seats`), and who keeps that up to date (`router`).
See docs/ROUTING.md."""
