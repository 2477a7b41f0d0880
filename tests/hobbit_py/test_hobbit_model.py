"""Hobbit is Llama, with a cache: the same results where that is promised, and everything else told."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hobbit_models import COMMON, LARGE, PROMPT, SMALL, greedy, high, hobbit, logits, low, run_python, stock

from hobbit_py import CacheStats, Candidates, ExpertReadError, Hobbit, _lib
from hobbit_py.trace import Trace


@pytest.mark.parametrize("flash_attn", [False, True])
def test_exact_mode_gives_the_logits_of_llama(flash_attn: bool) -> None:
    with hobbit(precision="high", logits_all=True, flash_attn=flash_attn) as ours:
        theirs = stock(logits_all=True, flash_attn=flash_attn)
        tokens = ours.tokenize(PROMPT.encode()) + greedy(ours)
        assert np.array_equal(logits(ours, tokens), logits(theirs, tokens))
        for token in tokens[:8]:  # one at a time
            ours.eval([token])
            theirs.eval([token])
        n = theirs.n_tokens
        assert np.array_equal(ours.scores[:n], theirs.scores[:n])
        assert ours.cache_stats().total.evictions > 0
        theirs.close()


def test_exact_mode_completes_and_chats_as_llama() -> None:
    theirs = stock()
    messages: list[Any] = [{"role": "user", "content": "Who was Moses?"}]
    with hobbit(precision="high") as ours:
        for model in (ours, theirs):
            model.set_seed(7)
        a, b = (m.create_completion(PROMPT, max_tokens=16, seed=7)["choices"][0]["text"] for m in (ours, theirs))
        assert a == b != ""
        streams = [
            "".join(
                chunk["choices"][0]["delta"].get("content") or ""
                for chunk in m.create_chat_completion(messages, max_tokens=16, stream=True, seed=7)
            )
            for m in (ours, theirs)
        ]
        assert streams[0] == streams[1]
    theirs.close()


def test_embeddings_are_those_of_llama() -> None:
    theirs = stock(embedding=True)
    with hobbit(precision="high", embedding=True) as ours:
        assert ours.embed(PROMPT) == theirs.embed(PROMPT)
    theirs.close()


def test_a_generation_is_a_new_sequence_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with hobbit() as model:
        begun: list[int] = []
        monkeypatch.setattr(_lib.lib, "hobbit_sequence_begin", lambda ctx, seq_id: begun.append(seq_id))
        greedy(model, 4)
        greedy(model, 4)  # the prompt is cached: no token at position 0
        assert begun == [0, 0]


def test_speculative_decoding_works() -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = 3 * "Verily, verily, I say unto thee. "
    theirs = stock(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4))
    with hobbit(precision="high", draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4)) as ours:
        assert greedy(ours, 32, prompt) == greedy(theirs, 32, prompt)
    theirs.close()


def test_a_vocabulary_alone_has_no_cache() -> None:
    with hobbit(vocab_only=True) as model:
        assert model.tokenize(b"In the beginning")
        with pytest.raises(ValueError, match="vocab_only"):
            model.cache_stats()


def test_grammars_work() -> None:
    from llama_cpp import LlamaGrammar

    with hobbit(low=low()) as model:
        grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
        assert model.create_completion("Is it?", max_tokens=4, grammar=grammar)["choices"][0]["text"] in ("yes", "no")


#
# statistics
#


def test_statistics_add_up() -> None:
    with hobbit(low=low(), logits_all=True) as model:  # else the last layer sees one row of the prompt
        n = len(model.tokenize(PROMPT.encode()))
        greedy(model, 24)
        s = model.cache_stats()
        assert (s.prompt_tokens, s.decode_tokens) == (n, 23)  # the last token was not evaluated
        for counters in (s.total, *s.layers):
            assert counters.hits + counters.misses + counters.skips == counters.lookups > 0
        place = model.placement
        assert s.total.selected == (n + 23) * place.n_layer * place.n_expert_used
        for name in s.rows()[0]:
            if name not in ("block", "hit_rate"):
                assert sum(row[name] for row in s.rows()) == getattr(s.total, name), name
        slots = {pool.precision: pool for pool in place.pools}
        assert 0 < s.total.read_bytes_high // s.total.misses_high <= slots["high"].slot_bytes
        assert s.total.read_bytes_high % s.total.misses_high == 0  # all experts of the model have one size
        assert s.total.prefetch_used + s.total.prefetch_wasted <= s.total.prefetch_issued
        resident = model.resident()
        assert resident.shape == (place.n_layer, place.n_expert)
        assert (resident == 2).sum() <= s.resident_high <= s.slots_high == slots["high"].slots
        assert 0 < s.resident_low <= s.slots_low == slots["low"].slots


def test_statistics_are_all_that_the_engine_counts() -> None:
    with hobbit() as model:
        greedy(model)
        with model._engine() as ctx:
            raw = json.loads(_lib.read_text(_lib.lib.hobbit_stats_json, ctx))
        stats = model.cache_stats()
        assert pickle.loads(pickle.dumps(stats)) == CacheStats.from_dict(raw)  # of a reading that nobody looked at
        assert stats.to_dict() == raw  # a new counter in C wants a field in stats.py
        assert not hasattr(stats, "no_such_field") and not hasattr(stats.total, "no_such_field")
        with model._engine() as ctx:
            placement = json.loads(_lib.read_text(_lib.lib.hobbit_placement_json, ctx))
        assert placement.items() <= json.loads(json.dumps(model.placement.to_dict())).items()


def test_delta_and_reset() -> None:
    with hobbit() as model:
        greedy(model, 4)
        before = model.cache_stats()
        with model.stats_delta() as delta:
            greedy(model, 8, "And it came to pass")
            inside = delta.stats
        greedy(model, 8, "In those days")
        assert delta.stats == inside
        assert delta.stats.decode_tokens == 7
        assert delta.stats.total.lookups + before.total.lookups < model.cache_stats().total.lookups
        model.reset_stats()
        s = model.cache_stats()
        assert s.total.lookups == s.steps == s.decode_tokens == 0
        assert s.resident_high > 0
        with pytest.raises(ValueError, match="reset"):
            _ = s - before


def test_a_policy_in_python_decides_what_leaves() -> None:
    options = {"low": low(), "deterministic": True, "prefetch": 0}
    with hobbit(policy="lru", **options) as expected, hobbit(policy="lfu", **options) as model:
        calls: list[Candidates] = []

        def least_recently_used(candidates: Candidates) -> int:
            assert (
                candidates.layers.shape == candidates.experts.shape == candidates.stamps.shape == candidates.used.shape
            )
            assert (candidates.high <= candidates.used).all() and (candidates.last <= candidates.tokens).all()
            calls.append(candidates)
            return int(candidates.stamps.argmin())

        model.set_policy(least_recently_used)
        assert greedy(model, 24) == greedy(expected, 24)
        ours, theirs = model.cache_stats().total, expected.cache_stats().total
        assert dataclasses.replace(ours, stall_us=0) == dataclasses.replace(theirs, stall_us=0)
        assert len(calls) == ours.evictions > 0
        assert {c.precision for c in calls} == {"low", "high"}
        assert (model.resident() == expected.resident()).all()
        assert model.cache_stats().policy == model.placement.policy == "custom"

        model.set_policy(None)
        assert model.cache_stats().policy == "lfu"
        greedy(model, 8, "In those days")
        assert len(calls) == ours.evictions


def test_an_exception_in_a_policy_is_raised_and_the_model_still_works() -> None:
    with hobbit(deterministic=True) as model:
        expected = greedy(model)
        model.set_policy(lambda candidates: candidates.experts.size)
        with pytest.raises(IndexError, match=r"the policy chose candidate \d+ of \d+"):
            greedy(model, prompt="In those days")
        model.set_policy(None)
        model.reset()
        assert greedy(model) == expected


def test_a_trace_holds_what_happened_inside_the_block(tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with hobbit(low=low()) as model:
        greedy(model, 4)
        with model.stats_delta() as delta, model.trace(path):
            greedy(model, 8, "In those days")
            with pytest.raises(ValueError, match="a trace of this model is being written already"), model.trace(path):
                pass
        greedy(model, 4)
        routes = list(Trace.load(path).routes())
        assert len(routes) == delta.stats.steps * model.placement.n_layer
        selected = sum(route.given.size for route in routes)
        assert selected == delta.stats.total.selected

        steps, total = Trace.load(path).steps(), delta.stats.total
        assert steps.tokens.sum() == delta.stats.prompt_tokens + delta.stats.decode_tokens
        assert steps.tokens[steps.prompt].sum() == delta.stats.prompt_tokens
        assert (steps.lookups.sum(), steps.hits.sum()) == (total.lookups, total.hits)
        assert steps.selected.sum(axis=0).tolist() == [total.selected_skip, total.selected_low, total.selected_high]
        assert steps.read_bytes.sum(axis=0)[:2].tolist() == [total.read_bytes_low, total.read_bytes_high]
        assert steps.chosen.sum() == total.selected
        with pytest.raises(ValueError, match="no such folder"), model.trace(tmp_path / "no such folder" / "run.trace"):
            pass


def test_a_second_thread_reads_statistics_during_generation() -> None:
    with hobbit(low=low(), deterministic=True) as model:
        alone = greedy(model, 48)
        model.reset()
        model.reset_stats()
        done = threading.Event()
        seen: list[int] = []
        errors: list[BaseException] = []

        def read() -> None:
            try:
                while not done.is_set():
                    s = model.cache_stats()
                    assert sum(layer.lookups for layer in s.layers) == s.total.lookups
                    assert model.resident().max() <= 2
                    seen.append(s.decode_tokens)
            except BaseException as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        watched = greedy(model, 48)
        done.set()
        reader.join()
        assert not errors
        assert watched == alone
        assert seen == sorted(seen) and len(seen) > 1


#
# control
#


@pytest.mark.parametrize("options", [{"precision": "high"}, {"deterministic": True}])
def test_resize_between_tokens_keeps_the_tokens(options: dict[str, Any]) -> None:
    if "deterministic" in options:
        options = {**options, "low": low()}
    with hobbit(**options, cache=LARGE) as model:
        expected = greedy(model, 48)
    with hobbit(**options, cache=SMALL) as model:
        tokens = []
        sizes = {8: LARGE, 16: SMALL, 24: 16, 32: LARGE, 40: "4MiB"}
        for token in model.generate(model.tokenize(PROMPT.encode()), temp=0.0):
            tokens.append(token)
            if len(tokens) == 48:
                break
            if len(tokens) in sizes:
                before = model.resident() != 0
                model.resize(sizes[len(tokens)])
                after = model.resident() != 0
                if sizes[len(tokens)] == LARGE:
                    assert (after >= before).all()  # nothing was lost
        assert tokens == expected


def test_a_resized_cache_is_the_one_that_a_load_gives() -> None:
    with hobbit(low=low(), cache=LARGE) as model:
        model.resize(SMALL)
        with hobbit(low=low(), cache=SMALL) as other:
            assert model.placement == other.placement


def test_resize_from_another_thread_keeps_the_tokens() -> None:
    with hobbit(precision="high", cache=LARGE) as model:
        expected = greedy(model, 64)
        model.reset()
        done = threading.Event()

        def change() -> None:
            while not done.is_set():
                model.resize(SMALL)
                model.resize(LARGE)

        changer = threading.Thread(target=change)
        changer.start()
        tokens = greedy(model, 64)
        done.set()
        changer.join()
        assert tokens == expected


def test_resize_refuses_what_cannot_work_and_changes_nothing() -> None:
    with hobbit(precision="high") as model:
        place = model.placement
        with pytest.raises(ValueError, match=r"too small.*smallest setting that works is --hobbit-cache \d+KiB"):
            model.resize("1KiB")
        with pytest.raises(ValueError, match="512MiB"):
            model.resize("lots")
        assert model.placement.cache_bytes == place.cache_bytes
        greedy(model, 4)


def test_two_models_at_once_do_not_mix() -> None:
    with hobbit(precision="high") as a, hobbit(low=low(), deterministic=True) as b:
        alone_a, alone_b = greedy(a), greedy(b)
        results: dict[str, list[int]] = {}
        threads = []
        for name, model in (("a", a), ("b", b)):
            model.reset()
            model.reset_stats()
            threads.append(threading.Thread(target=lambda n=name, m=model: results.update({n: greedy(m)})))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {"a": alone_a, "b": alone_b}
        assert a.cache_stats().total.selected_low == 0 < b.cache_stats().total.selected_low


def test_placement_says_what_is_in_effect() -> None:
    with hobbit(low=low(), t1=0.5, t2=0.8, policy="lru", io_threads=2, weights=(1, 0, 0, 0)) as model:
        place = model.placement
        assert (place.precision, place.t1, place.t2, place.policy, place.io_threads) == ("hobbit", 0.5, 0.8, "lru", 2)
        assert [pool.file for pool in place.pools] == [high(), low()]
        assert not place.flash_attention and "flash attention" in place.unlike_llama_cli[0]
        assert low() in str(place)
    with hobbit(flash_attn=True) as model:
        assert model.placement.precision == "high" and model.placement.flash_attention


def test_a_pickled_model_has_its_options() -> None:
    with hobbit(low=low(), t1=0.5, deterministic=True, kv_overrides={"some.key": 1}, n_ctx=64) as model:
        with pickle.loads(pickle.dumps(model)) as copy:
            assert copy.placement == model.placement
            assert copy.kv_overrides["some.key"] == 1
            assert copy.n_ctx() == model.n_ctx()
            assert greedy(copy, 8) == greedy(model, 8)


@pytest.mark.parametrize("local_dir", [False, True])
def test_from_pretrained_takes_low_from_the_repository(
    local_dir: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hub that holds two files and copies what it is asked for."""
    hub: Any = types.ModuleType("huggingface_hub")
    utils: Any = types.ModuleType("huggingface_hub.utils")
    utils.validate_repo_id = lambda repo_id: None
    files = {"model-F16.gguf": high(), "model-Q4_0.gguf": low()}

    class HfFileSystem:
        def ls(self, repo_id: str, recursive: bool) -> list[str]:
            return [f"{repo_id}/{name}" for name in files]

    def hf_hub_download(filename: str, **_: Any) -> str:
        if not (tmp_path / filename).exists():
            (tmp_path / filename).symlink_to(files[filename])
        return str(tmp_path / filename)

    hub.HfFileSystem, hub.hf_hub_download = HfFileSystem, hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    options = {**COMMON, "cache": SMALL, **({"local_dir": str(tmp_path)} if local_dir else {})}
    with Hobbit.from_pretrained("some/model", "*F16.gguf", low="model-Q4_0.gguf", **options) as model:
        assert isinstance(model, Hobbit)
        assert [
            os.path.samefile(pool.file, tmp_path / name)
            for pool, name in zip(model.placement.pools, files, strict=True)
        ] == [True, True]
    with Hobbit.from_pretrained("some/model", "*F16.gguf", low=low(), **options) as model:
        assert model.placement.pools[1].file == low()


#
# refusals
#


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"n_ctxx": 64}, TypeError, "unknown option 'n_ctxx'; did you mean 'n_ctx'"),
        ({"cachee": 64}, TypeError, "did you mean 'cache'"),
        ({"t1": 2}, ValueError, "0 to 1"),
        ({"t1": 0.9, "t2": 0.5}, ValueError, "T1 must not exceed T2"),
        ({"policy": "fifo"}, ValueError, "hobbit, lru, lfu, lfu-model, lhu"),
        ({"precision": "low"}, ValueError, "needs --hobbit-low"),
        ({"cache": "1KiB"}, ValueError, "smallest setting that works"),
        ({"cache": "many"}, ValueError, "512MiB"),
        ({"low": "nowhere.gguf"}, ValueError, "nowhere.gguf: cannot be opened"),
        ({"low": __file__}, ValueError, "not a GGUF file"),
        ({"model_path": "nowhere.gguf"}, ValueError, "nowhere.gguf"),
        ({"model_path": __file__}, ValueError, "test_hobbit_model.py"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(options: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        hobbit(**options)


def test_every_option_of_the_engine_is_a_keyword() -> None:
    assert {"low", "cache", "precision", "t1", "t2", "policy", "deterministic"} <= _lib.OPTIONS.keys()
    explicit = Hobbit.__init__.__kwdefaults__.keys()
    assert explicit - {"progress"} <= _lib.OPTIONS.keys()


def test_a_closed_model_says_so() -> None:
    model = hobbit()
    model.close()
    model.close()
    for use in (model.cache_stats, model.resident, model.reset_stats, lambda: model.resize("8MiB")):
        with pytest.raises(ValueError, match="closed"):
            use()


_THREADS = """
import sys, threading
sys.path.insert(0, {here!r})
from hobbit_models import PROMPT, greedy, hobbit, low

model = hobbit(low=low(), deterministic=True)
expected = greedy(model, 24)
said = []

def generate(n, started):
    try:
        for _ in model.generate(model.tokenize(PROMPT.encode()), temp=0.0):
            n -= 1
            if n == 0:
                return
            started.set()
    except (ValueError, RuntimeError) as error:
        said.append(str(error))

def begin(n):
    started = threading.Event()
    thread = threading.Thread(target=generate, args=(n, started))
    thread.start()
    assert started.wait(60)
    return thread

{body}
print(said)
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("t = begin(200); model.close(); t.join()", ["the model is closed"]),
        (
            "for t in [begin(200), begin(4)]: t.join()\nmodel.reset()\nassert greedy(model, 24) == expected",
            ["something else was computed with the model in the middle of a generation"],
        ),
    ],
    ids=["closed by another thread", "two threads generate"],
)
def test_threads_that_share_a_model_do_no_harm(body: str, says: list[str]) -> None:
    """Nothing crashes, who cannot go on is told, and an open model works on."""
    done = run_python(_THREADS.format(here=str(Path(__file__).parent), body=body))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(says)


#
# interruptions
#


def test_progress_counts_up_to_the_whole() -> None:
    shares: list[float] = []
    hobbit(progress=shares.append).close()
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_an_exception_in_the_progress_callback_stops_the_load() -> None:
    def fail(share: float) -> None:
        raise ZeroDivisionError("in the callback")

    def interrupt(share: float) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(ZeroDivisionError, match="in the callback"):
        hobbit(progress=fail)
    with pytest.raises(KeyboardInterrupt):
        hobbit(progress=interrupt)
    with pytest.raises(ValueError, match="stopped by the progress callback"):
        hobbit(progress=lambda share: False)


def test_an_interrupt_leaves_a_model_that_works() -> None:
    with hobbit(precision="high") as model:
        expected = greedy(model)
        model.reset()

        def interrupt() -> None:
            while model.cache_stats().decode_tokens < start + 4:
                pass
            os.kill(os.getpid(), signal.SIGINT)

        start = model.cache_stats().decode_tokens
        killer = threading.Thread(target=interrupt)
        killer.start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                greedy(model, 200)
        killer.join()
        assert greedy(model) == expected


def test_exceptions_in_callbacks_reach_the_caller_and_the_model_still_works() -> None:
    from llama_cpp import LogitsProcessorList, StoppingCriteriaList

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("in the callback")

    with hobbit(precision="high") as model:
        expected = greedy(model)
        for callback in (
            {"stopping_criteria": StoppingCriteriaList([fail])},
            {"logits_processor": LogitsProcessorList([fail])},
        ):
            with pytest.raises(ZeroDivisionError, match="in the callback"):
                model.create_completion(PROMPT, max_tokens=8, **callback)
            assert greedy(model) == expected


def failing_read(tmp_path: Path) -> tuple[Hobbit, list[int], Callable[[], None]]:
    """A model whose file was cut after it generated the tokens, and what repairs the file."""
    copy = tmp_path / "copy.gguf"
    shutil.copy(high(), copy)
    model = hobbit(model_path=str(copy), precision="high")
    expected = greedy(model)
    stat, content = copy.stat(), copy.read_bytes()
    os.truncate(copy, len(content) // 2)

    def repair() -> None:
        copy.write_bytes(content)
        os.utime(copy, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return model, expected, repair


def test_a_failed_read_names_file_tensor_and_expert(tmp_path: Path) -> None:
    model, _, _ = failing_read(tmp_path)
    with model:
        says = r"copy\.gguf: changed while in use.*\(tensor blk\.\d+\.ffn_\w+\.weight, expert \d+\)"
        with pytest.raises(ExpertReadError, match=says):
            greedy(model, 64, "And the children of Israel")
        assert model.cache_stats().failed_steps == 1


def test_after_a_failed_read_the_model_works_when_the_file_does(tmp_path: Path) -> None:
    model, expected, repair = failing_read(tmp_path)
    with model:
        with pytest.raises(ExpertReadError):
            greedy(model, 64, "And the children of Israel")
        repair()
        assert greedy(model) == expected


#
# memory
#

_LOAD_OFTEN = """
import ctypes, gc, json, os, sys
sys.path.insert(0, {here!r})
from hobbit_models import greedy, hobbit, low, stock

class Heap(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena o s h mapped u f used free k".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Heap

def measure():
    gc.collect()
    heap = libc.mallinfo2()
    pages = int(open("/proc/self/statm").read().split()[0])
    return [heap.used + heap.mapped, pages, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]

seen = []
for _ in range(20):
    model = {load}
    greedy(model, 4)
    model.close()
    del model
    seen.append(measure())
print(json.dumps([last - fifth for last, fifth in zip(seen[-1], seen[4])]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc and /proc")
def test_loading_twenty_times_grows_no_more_than_llama_does() -> None:
    growth = {}
    for load in ("stock()", "hobbit(low=low())"):
        done = run_python(_LOAD_OFTEN.format(here=str(Path(__file__).parent), load=load))
        assert done.returncode == 0, done.stderr
        growth[load] = json.loads(done.stdout)
    (heap, pages, files, threads), theirs = growth["hobbit(low=low())"], growth["stock()"]
    assert heap <= max(0, theirs[0]) + 16384  # bytes, in 15 loads; one cache takes 6 MiB
    assert pages * 4096 <= max(0, theirs[1]) + (12 << 20)  # of address space: 15 caches would be 90 MiB
    assert (files, threads) == (0, 0)
