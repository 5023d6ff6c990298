"""Every setting has one origin and one value; what cannot work is refused before anything starts."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest

from baton.common.config import ClusterConfig, from_mapping
from baton.common.config_checks import validate
from baton.common.errors import ConfigError
from baton.common.kv.cache_dtype import CacheDtype
from baton.common.kv.layout import Component, KvLayout
from baton.common.kv.pool import KvPool
from baton.common.kv.sizing import decided_counts
from baton.common.resolve import (
    Decision,
    Layer,
    Machine,
    Resolved,
    assignments_layer,
    environment_layer,
    file_layer,
    get,
    merge,
    resolve,
)

BARE = Machine(has_compiler=False, has_ucx=False)
FULL = Machine(has_compiler=True, has_ucx=True)


@dataclasses.dataclass(frozen=True)
class Facts:
    name: str = "tiny"
    max_positions: int = 1000
    bytes_per_token: int = 1024
    window: int = 0
    state_bytes: int = 0
    full: bool = True

    def layout(self, page_size: int) -> KvLayout:
        return KvLayout(page_size, full=self.full, window=self.window, state=self.state_bytes > 0)

    def component_bytes(self, component: Component, dtype: str, *, cache_dtype: CacheDtype) -> int:
        return self.state_bytes if component is Component.STATE else self.bytes_per_token


def decide(*assignments: str, machine: Machine = FULL, facts: Facts | None = None) -> Resolved:
    return resolve([assignments_layer(assignments)], lambda name: facts or Facts(), machine)


def decision(resolved: Resolved, field: str) -> Decision:
    (found,) = [decision for decision in resolved.decisions if decision.field == field]
    return found


def test_later_layers_win_and_every_value_tells_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("prefill: 3\ndecode: 4\nkv:\n  page_size: 4\n  prefix_cache: chunk\n")
    monkeypatch.setenv("BATON_SET_DECODE", "5")
    monkeypatch.setenv("BATON_SET_KV__PAGE_SIZE", "8")
    config, given = merge([file_layer(path), environment_layer(), assignments_layer(["kv.page_size=16"])])
    assert (config.prefill, config.decode, config.kv.page_size, config.kv.prefix_cache) == (3, 5, 16, "chunk")
    assert {decision.field: decision.why for decision in given} == {
        "prefill": str(path),
        "decode": "environment",
        "kv.page_size": "command line",
        "kv.prefix_cache": str(path),
    }


def test_nothing_auto_is_left() -> None:
    def leftovers(value: object, path: str) -> list[str]:
        if dataclasses.is_dataclass(value):
            return [
                left
                for field in dataclasses.fields(value)
                for left in leftovers(getattr(value, field.name), f"{path}.{field.name}")
            ]
        return [path] if value is None or value == "auto" else []

    assert leftovers(decide().config, "config") == []


def test_the_defaults_are_valid() -> None:
    assert merge([])[0] == ClusterConfig()


@pytest.mark.parametrize(
    ("assignments", "field", "says"),
    [
        (["kv.pagesize=4"], "kv.pagesize", "did you mean kv.page_size?"),
        (["prefil=1"], "prefil", "did you mean prefill?"),
        (["kv.page_size=5"], "kv.page_size", "must be one of"),
        (["kv.page_size=big"], "kv.page_size", "expected int"),
        (["kv=3"], "kv", "group of settings"),
        (["decode=0"], "decode", "at least one decode worker"),
        (["prefill=-1"], "prefill", "cannot be negative"),
        (["model.dtype=fp8"], "model.dtype", "float32, bfloat16"),
        (["transfer.lanes=[zqm]"], "transfer.lanes", "did you mean zmq?"),
        (["transfer.lanes=[1]"], "transfer.lanes", "expected str"),
        (["transfer.max_tombstones=0"], "transfer.max_tombstones", "must be positive"),
        (["decode_worker.num_reserved_decode_tokens=-1"], "decode_worker.num_reserved", "cannot be negative"),
        (["gateway.request_timeout_s=.inf"], "gateway.request_timeout_s", "finite"),
        (["gateway.request_timeout_s=.nan"], "gateway.request_timeout_s", "finite"),
        (["gateway.request_timeout_s=1.0e+10"], "gateway.request_timeout_s", "at most 1e+06"),
        (["gateway.port=70000"], "gateway.port", "65535"),
        (["cluster=a/b"], "cluster", "names a directory"),
        (["cluster=../a"], "cluster", "names a directory"),
        (["cluster=''"], "cluster", "names a directory"),
        ([f"cluster={'n' * 300}"], "cluster", "at most 64"),
        (["kv.num_pages=2147483648"], "kv.num_pages", "at most 2147483647"),
        (["liveness.dead_after_s=0.1"], "liveness", "heartbeat_interval_s < dead_after_s"),
        (["liveness.heartbeat_interval_s=0"], "liveness", "0 < heartbeat_interval_s"),
        (["liveness.republish_interval_s=3"], "liveness", "republish_interval_s < dead_after_s"),
        (["liveness.republish_interval_s=0"], "liveness", "0 < republish_interval_s"),
        (["model.max_model_len=2000"], "model.max_model_len", "has 1000 positions"),
        (["model.max_model_len=1"], "model.max_model_len", "no prompt fits"),
        (["kv.num_pages=1", "kv.page_size=1"], "model.max_model_len", "all that one pool can hold, and no prompt fits"),
        (["bind_host=0.0.0.0"], "bind_host", "every interface"),
        (["bind_host='::'"], "bind_host", "every interface"),
        (["bind_host='*'"], "bind_host", "every interface"),
        (["kv.num_pages=10", "model.max_model_len=500"], "model.max_model_len", "tokens (raise kv.num_pages)"),
        (["kv.pool_bytes=1000"], "kv.pool_bytes", "too small"),
        (["kv.tiers.host_bytes=-1"], "kv.tiers.host_bytes", "cannot be negative"),
        (["kv.tiers.disk_bytes=0"], "kv.tiers.disk_bytes", "must be positive"),
        (["kv.tiers.external_bytes=0"], "kv.tiers.external_bytes", "must be positive"),
        (["kv.tiers.restore_min_pages=0"], "kv.tiers.restore_min_pages", "must be positive"),
        (["kv.tiers.restore_deadline_s=.inf"], "kv.tiers.restore_deadline_s", "finite"),
        (["kv.tiers.max_queued_jobs=0"], "kv.tiers.max_queued_jobs", "must be positive"),
        (["kv.tiers.disk_path=cache"], "kv.tiers.disk_path", "absolute"),
        (["kv.tiers.external=redis://host"], "kv.tiers.external", "file:///"),
        (["kv.tiers.external=file://host/path"], "kv.tiers.external", "file:///"),
        (["kv.tiers.external=file:///"], "kv.tiers.external", "below the root"),
        (["kv.tiers.external=file:///mnt/kv?size=1"], "kv.tiers.external", "plain path"),
        (["kv.tiers.external=file:///mnt/my%20kv"], "kv.tiers.external", "plain path"),
        (['kv.tiers.external="file:///mnt/k\\tv"'], "kv.tiers.external", "characters"),
        (['kv.tiers.disk_path="/mnt/k\\0v"'], "kv.tiers.disk_path", "characters"),
        (["kv.tiers.write=around"], "kv.tiers.write", "through, back"),
        (["kv.tiers.host_bytes=1000000", "kv.prefix_cache=chunk"], "kv.tiers", "keeps nothing"),
        (["no_equals_sign"], "--set", "expected key=value"),
        (["kv.page_size=[1"], "kv.page_size", "YAML"),
        (["kv.page_size.x=1", "kv.page_size=2"], "kv.page_size", ""),
    ],
)
def test_what_cannot_work_is_refused_by_name(assignments: list[str], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(*assignments)
    assert caught.value.field.startswith(field)
    assert says in str(caught.value)


def test_the_message_names_the_layer(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("decod: 1")
    with pytest.raises(ConfigError, match=r"my\.yaml.*did you mean decode"):
        merge([file_layer(path)])


@pytest.mark.parametrize(("text", "says"), [("a: [", "not valid YAML"), ("- 1", "settings by name")])
def test_a_broken_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        file_layer(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        file_layer(Path("/nowhere.yaml"))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert file_layer(path).values == {}


def test_lanes_that_are_not_installed_are_left_out_unless_asked_for() -> None:
    assert decide(machine=FULL).config.transfer.lanes == ("local", "ucx", "tcp", "zmq")
    resolved = decide(machine=BARE)
    assert resolved.config.transfer.lanes == ("local", "tcp", "zmq")
    assert "ucxx is not installed" in decision(resolved, "transfer.lanes").why
    with pytest.raises(ConfigError, match="ucxx is not installed"):
        decide("transfer.lanes=[ucx]", machine=BARE)


def test_zmq_is_always_the_last_resort() -> None:
    assert decide("transfer.lanes=[local]").config.transfer.lanes == ("local", "zmq")


def test_attention_is_compiled_where_there_is_a_compiler() -> None:
    assert decide(machine=FULL).config.model.attention == "compiled"
    assert decide(machine=BARE).config.model.attention == "torch"
    assert decide("model.attention=torch", machine=FULL).config.model.attention == "torch"


def test_a_step_may_take_what_was_promised_between_two_tokens() -> None:
    assert decide("autoscale.itl_s=0.2").config.decode_worker.itl_s == 0.2
    assert decision(decide(), "decode_worker.itl_s").value == 0.05
    assert decide("decode_worker.itl_s=0", "autoscale.itl_s=0.2").config.decode_worker.itl_s == 0
    with pytest.raises(ConfigError, match=r"decode_worker\.itl_s"):
        decide("decode_worker.itl_s=-1")


def test_int8_weights_are_refused_where_nothing_computes_with_them() -> None:
    assert decide("model.weights=int8", machine=FULL).config.model.weights == "int8"
    with pytest.raises(ConfigError, match=r"model\.weights.*compiled kernels"):
        decide("model.weights=int8", machine=BARE)
    with pytest.raises(ConfigError, match=r"model\.weights.*compiled kernels"):
        decide("model.weights=int8", "model.attention=torch", machine=FULL)
    with pytest.raises(ConfigError, match=r"model\.weights.*on cuda"):
        decide("model.weights=int8", "model.device=cuda", machine=FULL)


def test_pages_come_from_bytes_and_the_length_from_model_and_pool() -> None:
    resolved = decide("kv.pool_bytes=1048576")
    assert resolved.config.kv.num_pages == 1024 // 16
    assert resolved.config.model.max_model_len == 1000
    resolved = decide("kv.num_pages=20")
    assert (resolved.config.kv.num_pages, resolved.config.model.max_model_len) == (20, 320)
    assert "one pool can hold" in decision(resolved, "model.max_model_len").why


def test_every_setting_can_be_read_by_its_name() -> None:
    def names(cls: type, path: str = "") -> list[str]:
        hints = typing.get_type_hints(cls)
        return [
            name
            for key, hint in hints.items()
            for name in (names(hint, f"{path}{key}.") if dataclasses.is_dataclass(hint) else [f"{path}{key}"])
        ]

    config = ClusterConfig()
    for name in names(ClusterConfig):
        get(config, name)


def test_layers_are_checked_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="smaller than one hand-off's credit"):
        merge([Layer("a", {"transfer": {"region_bytes": 64 << 20}})])


GEMMA = Facts(window=512, bytes_per_token=4096)


def test_pages_are_laid_out_for_whoever_attends() -> None:
    assert decide(machine=FULL).config.kv.page_layout == "panels"
    assert decide("kv.page_size=8", machine=FULL).config.kv.page_layout == "canonical"
    assert decide(machine=BARE).config.kv.page_layout == "canonical"
    assert decide("kv.page_layout=canonical", machine=FULL).config.kv.page_layout == "canonical"
    with pytest.raises(ConfigError, match=r"kv\.page_layout = 'panels'.*page of 8 tokens"):
        decide("kv.page_layout=panels", "kv.page_size=8", machine=FULL)


def test_a_window_beside_full_attention_gets_what_its_requests_need_and_at_most_as_many_pages() -> None:
    kv = decide("kv.pool_bytes=1073741824", "decode_worker.max_running_requests=8", facts=GEMMA).config.kv
    # (511 + 2 * 15 + 512) / 16 pages behind and ahead, and 32 that the prefix tree's lease locks
    assert kv.swa_pages == 2 * 8 * (66 + 32)
    assert (kv.num_pages or 0) + (kv.swa_pages or 0) == (1 << 30) // (16 * 4096)
    crowded = decide("kv.pool_bytes=1073741824", "decode_worker.max_running_requests=500", facts=GEMMA).config.kv
    assert crowded.swa_pages == crowded.num_pages == (1 << 30) // (2 * 16 * 4096)
    given = decide("kv.num_pages=300", facts=GEMMA).config.kv
    assert (given.num_pages, given.swa_pages, given.state_slots) == (300, 300, 0)
    assert decide("kv.swa_pages=120", facts=GEMMA).config.kv.swa_pages == 120


def test_states_get_three_slots_per_request_within_a_quarter() -> None:
    facts = Facts(state_bytes=1 << 20)
    kv = decide("kv.pool_bytes=1073741824", "decode_worker.max_running_requests=8", facts=facts).config.kv
    assert kv.state_slots == 24
    assert kv.num_pages == ((1 << 30) - (24 << 20)) // (16 * 1024)
    kv = decide("kv.pool_bytes=1073741824", "decode_worker.max_running_requests=800", facts=facts).config.kv
    assert kv.state_slots == 256
    only = decide("kv.pool_bytes=1073741824", facts=Facts(state_bytes=1 << 20, full=False))
    assert (only.config.kv.num_pages, only.config.kv.state_slots) == (1024, 0)
    assert only.config.model.max_model_len == 1000  # of any length, as far as the pool is concerned


@pytest.mark.parametrize(
    ("facts", "assignments", "field", "reason"),
    [
        (GEMMA, ["kv.pool_bytes=8000000"], "kv.pool_bytes", "swa pages"),
        (GEMMA, ["kv.swa_pages=30"], "kv.swa_pages", "swa pages"),
        (Facts(state_bytes=1 << 20), ["kv.pool_bytes=4000000"], "kv.pool_bytes", "2 state slots of 1.0 MiB"),
        (Facts(state_bytes=1 << 20), ["kv.state_slots=1"], "kv.state_slots", "2 state slots"),
        (Facts(full=False, window=100), ["kv.pool_bytes=100000"], "kv.pool_bytes", "swa pages"),
    ],
)
def test_pools_too_small_for_one_request_are_refused(
    facts: Facts, assignments: list[str], field: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(*assignments, facts=facts)
    assert caught.value.field == field
    assert reason in caught.value.reason


def test_what_is_decided_is_enough_for_the_longest_request() -> None:
    """The pool agrees: nothing that passes the door is too long for it."""
    for facts in (GEMMA, Facts(state_bytes=4096, window=64), Facts(full=False, window=40), Facts(state_bytes=64)):
        resolved = decide("kv.pool_bytes=20000000", facts=facts).config
        layout = facts.layout(resolved.kv.page_size)
        counts = {one: count + 1 for one, count in decided_counts(resolved.kv, layout).items()}
        longest = resolved.model.max_model_len
        assert longest is not None
        pool = KvPool(layout, counts, 4, longest, step_tokens=resolved.prefill_worker.chunk_tokens)
        assert pool.longest == longest


def test_gateways_of_one_machine_take_ports_one_after_the_other() -> None:
    config = from_mapping(ClusterConfig, {"gateways": 3, "gateway": {"port": 9000}, "placement": {"resources": "cpu"}})
    assert [config.gateway_port(number) for number in range(3)] == [9000, 9001, 9002]
    config = from_mapping(ClusterConfig, {"gateways": 2, "gateway": {"port": 9000}, "placement": {"resources": "role"}})
    assert [config.gateway_port(number) for number in range(2)] == [9000, 9000]
    with pytest.raises(ConfigError, match="gateways"):
        validate(from_mapping(ClusterConfig, {"gateways": 0}))
    with pytest.raises(ConfigError, match="65535 is the last"):
        validate(from_mapping(ClusterConfig, {"gateways": 2, "gateway": {"port": 65535}}))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": {"attention": "triton"}}, "model.attention"),
        ({"model": {"attention": "flashinfer"}}, "model.attention"),
        ({"model": {"device": "cuda", "attention": "compiled"}}, "model.attention"),
        ({"model": {"device": "cuda", "forward_path": "fused"}}, "model.forward_path"),
        ({"model": {"device": "cuda", "model": "fake"}}, "model.device"),
        ({"model": {"device": "cuda"}, "kv": {"tiers": {"host_bytes": 1 << 20}}}, "kv.tiers"),
        ({"model": {"device": "cuda", "graph_rows": -1}}, "model.graph_rows"),
    ],
)
def test_what_a_device_cannot_do_is_refused(values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate(from_mapping(ClusterConfig, values))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.attention", "torch"),
        ("model.attention", "triton"),
        ("model.weights", "int8"),
        ("model.forward_path", "generic"),
        ("kv.page_layout", "canonical"),
        ("kv.page_layout", "panels"),
    ],
)
def test_what_the_fake_model_would_ignore_is_refused(field: str, value: str) -> None:
    part, name = field.split(".")
    fake = {"model": {"model": "fake"}}
    settings = {**fake, part: {**fake.get(part, {}), name: value}}
    with pytest.raises(ConfigError) as refused:
        validate(from_mapping(ClusterConfig, settings))
    assert (refused.value.field, refused.value.value) == (field, value)


def test_what_attends_on_a_device_is_left_to_its_worker() -> None:
    layers = [Layer("test", {"model": {"device": "cuda"}})]
    config = resolve(layers, lambda model: Facts(), FULL).config
    assert (config.model.attention, config.kv.page_layout) == ("auto", "canonical")
