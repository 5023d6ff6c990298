"""A record is moved, never copied; and its lengths have few writers."""

import ast
import copy
import pickle  # noqa: TID251 - to show that it refuses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.common.kv.errors import OwnershipError, UseAfterMoveError
from baton.common.kv.record import ReqKvInfo, take_kv

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "transfer", "prefill", "decode", "deploy")
LENGTHS = {
    "cache_protected_len",
    "kv_committed_len",
    "kv_allocated_len",
    "req_pool_idx",
    "prefix_lock",
    "swa_evict_floor",
    "swa_evicted_seqlen",
    "swa_promised",
    "state_slot",
    "state_source",
}


@dataclass
class Holder:
    kv: ReqKvInfo | None = None


def make_record() -> ReqKvInfo:
    return ReqKvInfo(req_pool_idx=3, cache_protected_len=16, kv_committed_len=20, kv_allocated_len=40, prefix_lock=None)


def test_a_move_leaves_nothing_behind_and_changes_nothing() -> None:
    first, second = Holder(make_record()), Holder()
    second.kv = take_kv(first)
    assert first.kv is None
    assert second.kv.req_pool_idx == 3
    assert second.kv.cache_protected_len == 16
    assert second.kv.kv_committed_len == 20
    assert second.kv.kv_allocated_len == 40


def test_an_old_reference_is_dead_after_a_move() -> None:
    holder = Holder(make_record())
    old = holder.kv
    assert old is not None
    moved = take_kv(holder)
    assert moved.live
    assert not old.live
    for name in LENGTHS:
        with pytest.raises(UseAfterMoveError, match="moved to another owner"):
            getattr(old, name)
    with pytest.raises(UseAfterMoveError):
        old.take()
    with pytest.raises(UseAfterMoveError):
        old.kv_committed_len += 1
    assert "moved" in repr(old)


def test_an_unknown_attribute_is_still_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        make_record().kv_commited_len  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        make_record().anything = 1  # type: ignore[attr-defined]


def test_taking_from_a_holder_that_owns_nothing_raises() -> None:
    with pytest.raises(OwnershipError):
        take_kv(Holder())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_record_cannot_be_duplicated(duplicate: Callable[[object], object]) -> None:
    record = make_record()
    with pytest.raises(TypeError):
        duplicate(record)
    assert record.live


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_nor_as_part_of_its_holder(duplicate: Callable[[object], object]) -> None:
    with pytest.raises(TypeError):
        duplicate(Holder(make_record()))


def test_a_record_cannot_be_subclassed_into_something_copyable() -> None:
    assert getattr(ReqKvInfo, "__final__", False)


def _writes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(function, attribute) of each assignment to a record's field, and ("…", "new") for each record made."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and node.attr in LENGTHS:
            yield function, node.attr
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name == "ReqKvInfo":
                yield function, "new"
            if name in ("setattr", "delattr") and any(
                isinstance(arg, ast.Constant) and arg.value in LENGTHS for arg in node.args
            ):
                yield function, "setattr"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(tree, "")


def test_lengths_are_written_only_by_the_allocation_functions() -> None:
    writers: dict[str, set[tuple[str, str]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found = set(_writes(ast.parse(path.read_text())))
            if found:
                writers[path.relative_to(ROOT).as_posix()] = found
    assert writers.pop("common/kv/record.py") == {("__init__", name) for name in LENGTHS} | {("take", "new")}
    assert writers == {
        "common/kv/resizing.py": {
            ("create", "new"),
            ("grow", "kv_allocated_len"),
            ("grow", "kv_committed_len"),
            ("shrink", "kv_allocated_len"),
            ("shrink", "kv_committed_len"),
            ("_rewind", "state_source"),
        },
        "common/kv/pool.py": {
            ("prepare_for_decode", "kv_allocated_len"),
            ("prepare_for_decode", "kv_committed_len"),
            ("open_incoming", "kv_committed_len"),
            ("commit_incoming", "kv_committed_len"),
        },
        "common/kv/caching.py": {("_insert", "cache_protected_len"), ("_insert", "prefix_lock")},
        "common/kv/window.py": {
            ("promise_for", "swa_promised"),
            ("release", "swa_promised"),
            ("free_below", "swa_evicted_seqlen"),
            ("free_from", "swa_evicted_seqlen"),
        },
        "common/kv/states.py": {
            ("start_over", "state_source"),
            ("written", "state_source"),
            ("take_copy", "state_source"),
            ("fork", "state_source"),
            ("fork", "state_slot"),
        },
    }
