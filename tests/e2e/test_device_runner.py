"""The runner for devices, with the host in the device's place: it says what `TorchRunner` says, and writes nowhere
else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from family_rig import FAMILIES, VOCAB, save_random_model
from model_rig import GREEDY, Pools, Sequence, pack_step, run_mixed, run_step
from msgspec import structs

from baton.common.engine.backends import DeviceBackends
from baton.common.engine.gpu.device import CaptureFailed, Event, Graph, HostDevice
from baton.common.engine.gpu.graphs import buckets
from baton.common.engine.gpu.runner import DeviceRunner
from baton.common.engine.paged_attention import TorchPagedAttention
from baton.common.engine.torch_runner import TorchRunner
from baton.common.errors import ConfigError
from baton.common.messages import SamplingParams
from baton.common.model.loading import load_model, model_info

PAGE_SIZE, PAGES = 4, 400
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11)


def device_runner(directory: Path, device: HostDevice, *, graph_rows: int = 6) -> DeviceRunner:
    info, torch_attention = model_info(str(directory)), TorchPagedAttention()
    return DeviceRunner(
        load_model(str(directory), "float32"),
        info,
        device,
        DeviceBackends(torch_attention, torch_attention),
        dtype="float32",
        num_pages=dict.fromkeys(info.layout(PAGE_SIZE).components, PAGES),
        page_size=PAGE_SIZE,
        max_graph_rows=graph_rows,
    )


def runner_on_cpus(directory: Path) -> TorchRunner:
    info = model_info(str(directory))
    counts = dict.fromkeys(info.layout(PAGE_SIZE).components, PAGES)
    model = load_model(str(directory), "float32")
    return TorchRunner(
        model, info, dtype="float32", num_pages=counts, page_size=PAGE_SIZE, attention="torch", forward_path="generic"
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are faster on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(family: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"device-{family}"
        if not directory.exists():
            save_random_model(FAMILIES[family], directory)
        return directory

    return make


def sequences(count: int, *params: SamplingParams) -> list[Sequence]:
    """Of lengths 1, 7 and 30, with these parameters in turn."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB) for _ in range((1, 7, 30)[number % 3])] for number in range(count)]
    return [Sequence(number, prompt, 4, params[number % len(params)]) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss", "mistral"))]
)
def test_it_says_what_the_runner_on_cpus_says(directory_of: Callable[[str], Path], family: str) -> None:
    directory = directory_of(family)
    ours = device_runner(directory, HostDevice())
    theirs = runner_on_cpus(directory)
    found, expected = sequences(5, GREEDY, SAMPLED), sequences(5, GREEDY, SAMPLED)
    run_mixed(ours, found, max_rows=4, seed=9, chunks=(1, 5, 33))
    run_mixed(theirs, expected, max_rows=2, seed=3, chunks=(5, 33))
    assert [one.outputs for one in found] == [one.outputs for one in expected]
    assert ours.graphs is not None
    assert ours.graphs.captured, "steps of decode alone have come"


def test_tokens_that_need_the_host_are_chosen_there(directory_of: Callable[[str], Path]) -> None:
    directory, results = directory_of("llama"), []
    for runner in (device_runner(directory, HostDevice()), runner_on_cpus(directory)):
        pools = Pools(runner, random.Random(1))
        pair = [Sequence(0, [5, 6, 7], 1, SamplingParams(logprobs=2)), Sequence(1, [9, 8], 1, SAMPLED)]
        batch = pack_step([one.row(8, pools) for one in pair], runner.memory.layout, [])
        results.append(runner.collect(runner.launch(batch)))
    assert results[0].tokens == results[1].tokens
    assert results[0].logprobs[1] is results[1].logprobs[1] is None
    found, expected = results[0].logprobs[0], results[1].logprobs[0]
    assert found is not None
    assert expected is not None
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert [token for token, _ in found.top] == [token for token, _ in expected.top]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_of_padding_touch_no_real_page(directory_of: Callable[[str], Path], family: str) -> None:
    runner = device_runner(directory_of(family), HostDevice())
    pools, rows = Pools(runner, random.Random(2)), sequences(5, GREEDY)  # five rows in a graph of six
    for row in rows:
        run_step(runner, pools, [row], [99])
    before = {component: buffer.as_bytes().copy() for component, buffer in runner.memory.buffers.items()}
    held = [row.row(1, pools) for row in rows]
    batch = pack_step(held, runner.memory.layout, [])
    runner.collect(runner.launch(batch))
    assert runner.graphs is not None
    assert runner.graphs.captured[-1] == 6
    for (component, buffer), table in zip(runner.memory.buffers.items(), (batch.main, batch.swa), strict=False):
        assert table is not None
        touched = {page for page in range(1, PAGES) if (buffer.as_bytes()[page] != before[component][page]).any()}
        assert touched == set((table.slots // PAGE_SIZE).tolist()), component
        pages, at = buffer.as_bytes().view("float32").reshape(*buffer.pool.shape), set(table.slots.tolist())
        old = before[component].view("float32").reshape(*buffer.pool.shape)
        for page in touched:
            for place in range(PAGE_SIZE):
                if page * PAGE_SIZE + place not in at:
                    same = torch.from_numpy(pages[page, :, :, :, place]), torch.from_numpy(old[page, :, :, :, place])
                    assert torch.equal(same[0].view(torch.int32), same[1].view(torch.int32)), (component, page, place)


class NoGraphs(HostDevice):
    def __init__(self) -> None:
        self.tries = 0

    def capture(self, work: Callable[[], torch.Tensor]) -> Graph:
        self.tries += 1
        raise CaptureFailed("operation not permitted when stream is capturing")


def test_without_graphs_it_goes_on_and_says_so_once(directory_of: Callable[[str], Path]) -> None:
    directory, device = directory_of("llama"), NoGraphs()
    without, with_graphs = device_runner(directory, device), device_runner(directory, HostDevice())
    found, expected = sequences(2, GREEDY), sequences(2, GREEDY)
    for runner, several in ((without, found), (with_graphs, expected)):
        pools = Pools(runner, random.Random(2))
        while not several[0].done:
            run_step(runner, pools, several, [99, 99])
    assert [one.outputs for one in found] == [one.outputs for one in expected]
    assert device.tries == 1, "the size is not tried again"
    assert with_graphs.graphs is not None
    assert with_graphs.graphs.captured == (2,), "two rows need no padding"


class Noting(HostDevice):
    """Whose events come when they are waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def event(self) -> Event:
        return _NotedWait(self)


class _NotedWait:
    def __init__(self, device: Noting) -> None:
        self._device = device

    def wait(self) -> None:
        self._device.waited += 1


def test_nobody_hears_of_layers_or_tokens_before_their_event(directory_of: Callable[[str], Path]) -> None:
    device = Noting()
    runner = device_runner(directory_of("llama"), device)
    batch = pack_step([sequences(3, GREEDY)[2].row(99, Pools(runner, random.Random(0)))], runner.memory.layout, [])
    told: list[tuple[int, int]] = []
    before = device.waited
    ticket = runner.launch(
        structs.replace(batch, report_after=(1, 3)), lambda count: told.append((count, device.waited))
    )
    begun = device.waited
    assert told == []
    runner.collect(ticket)
    assert [count for count, _ in told] == [1, 3]
    assert [waited - begun for _, waited in told] == [1, 2]
    assert device.waited - begun == 3, "and the tokens'"
    assert begun - before <= 1, "launching waits for nothing but the arrays of the step before"


def test_a_model_with_states_is_refused(directory_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"model\.device.*recurrent"):
        device_runner(directory_of("lfm2"), HostDevice())


def test_buckets_are_dense_where_padding_would_cost() -> None:
    assert buckets(1) == (1,)
    assert buckets(6) == (1, 2, 4, 6)
    assert buckets(20) == (1, 2, 4, 8, 16, 20)
