def test_gateways_of_one_machine_take_ports_one_after_the_other() -> None:
    config = from_mapping(ClusterConfig, {"gateways": 3, "gateway": {"port": 9000}, "placement": {"resources": "cpu"}})
    assert [config.gateway_port(number) for number in range(3)] == [9000, 9001, 9002]
    config = from_mapping(ClusterConfig, {"gateways": 2, "gateway": {"port": 9000}, "placement": {"resources": "role"}})
    assert [config.gateway_port(number) for number in range(2)] == [9000, 9000]
    with pytest.raises(ConfigError, match="gateways"):
        validate(from_mapping(ClusterConfig, {"gateways": 0}))
