"""``triolet bench``: turns, ratios, clips, limits, the report; and a contest from the command to the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import soundfile
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertModel

from triolet import demo
from triolet.bench.contenders import serve
from triolet.bench.contest import Rules, play
from triolet.bench.inputs import (
    RATE,
    Clips,
    Piece,
    packed,
    pieces_of,
    prompts_of,
    queries_of,
    texts_of,
    word_error_rate,
)
from triolet.bench.machine import Machine
from triolet.bench.report import as_json, least_cosine, plot, ratios_of, shown, waits_of
from triolet.bench.rounds import BenchError, Contender, Entry, Outcome, Ratio, opened, take_turns
from triolet.bench.scenarios import (
    EMBED,
    SPEECH,
    arrivals,
    embed_scenarios,
    names_of_text,
    speech_scenarios,
    text_scenarios,
)
from triolet.bench.work import Work
from triolet.core.errors import InvalidRequest

from ..checkpoints.checkpoints import random_model, save_checkpoint, text_settings
from ..checkpoints.words import BERT

CONTENDERS = Path(serve.__file__).parent
MACHINE = Machine(cpu="a CPU", threads=2, load=0.0, gigaflops=dict.fromkeys(("float32", "int8"), 100.0), gigabytes=10.0)
WORK = Work(window_flops=1e9, attention_flops=0.0, step_weights=10**6, row_weights=10**6)


@pytest.fixture
def entry(tmp_path):
    """``entry(name)``: a contender that answers every input with its length; each task takes it a second more."""
    program = tmp_path / "contender"
    program.with_suffix(".py").write_text(
        dedent("""
            import json, sys
            print(json.dumps({"opened": 0.5, "about": {"name": sys.argv[1]}}), flush=True)
            for number, line in enumerate(sys.stdin):
                task = json.loads(line)
                if task.get("paths") == ["end"]:
                    sys.exit("no such thing")
                answers = [{"tokens": [len(path)], "text": path, "total": 1.0} for path in task["paths"]]
                told = {"counted": 3e6} if task.get("thread") else {}
                print(json.dumps({"seconds": float(sys.argv[1]) * number, "answers": answers, **told}), flush=True)
        """)
    )

    def make(name, factor=1.0, numbers="float32"):
        return Entry(name=name, program=str(program), arguments=(str(factor),), numbers=numbers)

    return make


@pytest.mark.real_time
def test_contenders_take_turns_and_the_first_round_does_not_count(entry):
    with opened([entry("triolet float32", 2.0), entry("peer float32", 3.0)]) as contenders:
        assert [one.about for one in contenders] == [{"name": "2.0"}, {"name": "3.0"}]
        tasks = []
        outcomes = take_turns(contenders, lambda n: tasks.append(n) or {"paths": ["a" * (n + 2)]}, rounds=3)
    assert tasks == [-1, -1, 0, 0, 1, 1, 2, 2]
    assert outcomes["triolet float32"].seconds == (2.0, 4.0, 6.0)
    assert outcomes["peer float32"].answers == [{"tokens": [4], "text": "aaaa", "total": 1.0}]
    ratio = Ratio.of(outcomes["peer float32"], outcomes["triolet float32"])
    assert ratio == Ratio(median=1.5, lowest=1.5, highest=1.5)


@pytest.mark.real_time
def test_a_contender_that_ends_says_why(entry):
    with opened([entry("peer")]) as (contender,):
        with pytest.raises(BenchError, match=r"(?s)peer ended with status 1; install a missing package.*no such thing"):
            contender.run({"paths": ["end"]})
        with pytest.raises(BenchError, match="peer ended"):
            contender.run({"paths": []})


@pytest.mark.real_time
def test_a_contender_without_an_interpreter_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"peer cannot be run by .*nowhere"):
        Contender.start(Entry(name="peer", program="serve", arguments=(), python=str(tmp_path / "nowhere")))


def test_ours_is_compared_with_peers_of_its_numbers_and_with_those_of_none_of_ours():
    names = {"triolet float32": "float32", "triolet int8": "int8", "a float32": "float32", "b bfloat16": "bfloat16"}
    entries = [Entry(name=name, program="", arguments=(), numbers=numbers) for name, numbers in names.items()]
    outcomes = {name: Outcome(seconds=(1.0, 2.0), answers=()) for name in names}
    assert set(ratios_of(entries[0], entries, outcomes)) == {"a float32", "b bfloat16"}
    assert set(ratios_of(entries[1], entries, outcomes)) == {"b bfloat16"}
    assert ratios_of(entries[2], entries, outcomes) == {}


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.real_time
def test_a_thread_of_the_contenders_process_computes_while_it_answers_and_no_longer(thread, tmp_path):
    program = tmp_path / "contender"
    program.with_suffix(".py").write_text(
        dedent(f"""
            import sys, threading
            sys.path.insert(0, {str(CONTENDERS)!r})
            from serve import serve

            def run(model, task):
                assert threading.active_count() == (2 if task["thread"] else 1)
                return [{{"tokens": [one.name for one in threading.enumerate()], "text": ""}}]

            serve(lambda: (None, {{}}), run)
        """)
    )
    with opened([Entry(name="peer", program=str(program), arguments=())]) as contenders:
        outcome = take_turns(contenders, lambda _: {"paths": ["a"], "thread": thread}, rounds=2)["peer"]
    assert [answer["tokens"] for answer in outcome.answers] == [["MainThread", "beside"] if thread else ["MainThread"]]
    assert len(outcome.counted) == (2 if thread else 0)


# -- what is asked -----------------------------------------------------------------------------------------------------


def write(path, seconds, **beside):
    samples = np.random.default_rng(0).standard_normal(round(seconds * RATE)).astype(np.float32) * 0.1
    soundfile.write(path, samples, RATE)
    for ending, text in beside.items():
        path.with_suffix(f".{ending}").write_text(text)


def test_a_long_recording_is_cut_where_nobody_speaks(tmp_path):
    """By the times of its words; without them it is cut anywhere, and its text is nobody's."""
    words = [{"word": word, "start": at, "end": at + 0.5} for word, at in (("one", 1.0), ("two", 1.6), ("three", 4.0))]
    write(tmp_path / "a.wav", 8.0, json=json.dumps({"words": words}))
    first, second = pieces_of(tmp_path / "a.wav", 5.0)
    assert (first.text, len(first.samples) / RATE) == ("one two", pytest.approx(1.3, abs=0.01))
    assert (second.text, len(second.samples) / RATE) == ("three", pytest.approx(0.7, abs=0.01))
    write(tmp_path / "b.wav", 8.0, txt="something")
    assert [(piece.text, len(piece.samples)) for piece in pieces_of(tmp_path / "b.wav", 3.0)] == [(None, 3 * RATE)] * 2
    (whole,) = pieces_of(tmp_path / "b.wav", 9.0)
    assert whole.text == "something"


@given(st.lists(st.floats(0.1, 4.0), min_size=1, max_size=20))
def test_pieces_are_packed_in_order_and_none_is_too_long(lengths):
    pieces = [Piece(np.ones(round(length * RATE), np.float32), str(index)) for index, length in enumerate(lengths)]
    found = packed(pieces, 5.0)
    assert " ".join(one.text for one in found).split() == [piece.text for piece in pieces]
    assert all(len(one.samples) <= 5.0 * RATE for one in found)
    assert sum(int(one.samples.sum()) for one in found) == sum(len(piece.samples) for piece in pieces)


def test_no_task_has_the_inputs_of_another(tmp_path):
    """Of no round and no scenario: what was computed before would be remembered."""
    write(tmp_path / "a.wav", 2.0, txt="said")
    out = tmp_path / "out"
    out.mkdir()
    clips, short = Clips.of(tmp_path, out, 3.0), Clips.of(tmp_path, out, 2.5)
    speech = speech_scenarios(clips.some, short.some, together=3, online=2, rate=1.0, trimmed=0.25)
    tasks = [each.task(number) for each in speech for number in (-1, 0, 1)]
    paths = [path for task in tasks for path in task["paths"]]
    assert len({Path(path).read_bytes() for path in paths}) == len(paths)
    assert {clips.texts.get(path, short.texts.get(path)) for path in paths} == {"said"}
    text = text_scenarios(prompts_of, tokens=9, together=(40,), online=40, rate=1.0)
    prompts = [prompt for each in text for number in (-1, 0, 1) for prompt in each.task(number)["prompts"]]
    assert len(set(prompts)) == len(prompts)
    vectors = embed_scenarios(queries_of, texts_of, together=64, online=40, rate=1.0)
    texts = [text for each in vectors for number in (-1, 0, 1) for text in each.task(number)["texts"]]
    assert len(set(texts)) == len(texts)
    with pytest.raises(InvalidRequest, match=r"nowhere has no recordings; allowed: a folder with files of .wav"):
        Clips.of(out / "nowhere", out, 3.0)


def test_word_errors_are_counted_where_somebody_has_told_the_words():
    heard = {"a": "Mr. Smith said so", "b": "anything"}
    assert word_error_rate({"a": "mister smith said no", "b": None}, heard) == pytest.approx(25.0)
    assert word_error_rate({}, heard) is None


@given(st.integers(0, 99), st.floats(0.1, 50.0))
def test_arrivals_know_nothing_of_each_other(seed, rate):
    found = arrivals(400, rate, seed)
    assert found[0] == 0.0
    assert found == sorted(found) == arrivals(400, rate, seed)
    assert 0.7 / rate < found[-1] / 399 < 1.4 / rate


def test_scenarios_ask_for_as_many_inputs_as_they_say():
    some = lambda count, number: [f"{number}-{index}" for index in range(count)]  # noqa: E731
    speech = speech_scenarios(some, some, together=8, online=5, rate=1.0, trimmed=0.25)
    assert tuple(each.name for each in speech) == SPEECH
    assert [len(each.task(0)["paths"]) for each in speech] == [1, 1, 1, 8, 1, 1, 1, 5]
    text = text_scenarios(some, tokens=9, together=(8, 32), online=5, rate=1.0)
    assert [len(each.task(0)["prompts"]) for each in text] == [1, 1, 8, 32, 5]
    assert tuple(each.name for each in text) == names_of_text((8, 32))
    assert text[0].task(3) == {"prompts": ["3-0"], "tokens": 9}
    vectors = embed_scenarios(some, some, together=64, online=5, rate=1.0)
    assert tuple(each.name for each in vectors) == EMBED
    assert [len(each.task(0)["texts"]) for each in vectors] == [1, 1, 64, 64, 5]
    assert [each.name for each in vectors if each.task(0).get("each")] == ["tasks"]
    everything = (*speech, *text, *vectors)
    assert [each.name for each in everything if each.task(0).get("thread")] == ["thread", "thread", "thread"]
    assert text[1].task(0)["tokens"] == 8


def test_queries_have_one_length_and_texts_have_the_same_lengths_in_each_round():
    assert [len(query.split()) for query in queries_of(3, 0)] == [12, 12, 12]
    lengths = [[len(text.split()) for text in texts_of(64, number)] for number in (0, 1)]
    assert lengths[0] == lengths[1]
    assert (min(lengths[0]), max(lengths[0]), len(set(lengths[0]))) == (6, 160, 8)


# -- limits and the report ---------------------------------------------------------------------------------------------


def test_the_work_of_a_window_is_that_of_the_encoders_matrices():
    """Two operations for each weight and row, and the attention; a step reads every matrix of the decoder once."""
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration.from_pretrained(demo.checkpoint())
    config, work = model.config, Work.of(demo.checkpoint())

    def matrices(module):
        return sum(one.numel() for name, one in module.named_parameters() if one.ndim == 2 and "positions" not in name)

    rows, cross = config.max_source_positions, 2 * config.d_model**2 * config.decoder_layers
    attention = 4 * rows**2 * config.d_model * config.encoder_layers
    assert work.window_flops == 2 * rows * (matrices(model.model.encoder) + cross)
    assert work.attention_flops == attention
    assert work.step_weights == matrices(model.model.decoder) - cross
    computed = (work.window_flops / 2 + attention / 4) / 1e11
    limit = work.limit(MACHINE, "int8", windows=1, share=0.5, steps=100)
    assert limit == pytest.approx(computed + work.step_weights / 1e8)


def test_each_token_of_a_text_is_multiplied_with_the_layers_and_with_no_embedding(minilm):
    layers = BertModel.from_pretrained(minilm).encoder.named_parameters()
    work = Work.of(minilm)
    assert work.row_weights == sum(one.numel() for _, one in layers if one.ndim == 2)
    limit = work.limit(MACHINE, "float32", windows=0, share=1.0, steps=0, rows=10)
    assert limit == pytest.approx(20 * work.row_weights / 1e11)


@pytest.mark.real_time
def test_a_machine_is_measured(monkeypatch):
    """By matrices that are small, since products in a type without instructions of its own take seconds."""
    monkeypatch.setattr("triolet.bench.machine._SIZE", 64)
    machine = Machine.measure(1)
    assert set(machine.gigaflops) == {"float32", "bfloat16", "int8"}
    assert min(*machine.gigaflops.values(), machine.gigabytes) > 0


def contest(entry, say=lambda line: None):
    entries = [entry("triolet float32", 1.0), entry("transformers float32", 2.0), entry("triolet int8", 0.5, "int8")]
    some = lambda count, number: [f"{number % 10}" for _ in range(count)]  # noqa: E731
    scenarios = speech_scenarios(some, some, together=2, online=3, rate=9.0, trimmed=0.25)
    rules = Rules(machine=MACHINE, work=WORK, rounds=2, texts={"1": "2"}, say=say)
    with opened(entries) as contenders:
        return list(play(contenders, scenarios, rules))


@pytest.mark.real_time
def test_the_report_says_what_came_out(entry, tmp_path):
    said = []
    tables = contest(entry, said.append)
    assert said[0] == "one: one clip, 2 rounds of 3"
    assert "trimmed: one short clip, trimmed, 2 rounds of 2" in said  # no peer has it
    lines = shown(tables)
    [*_, faster] = shown([evolve(tables[0], lines=(evolve(tables[0].lines[0], limit=3.25),))])
    assert "; below the 3.250 s of reading each weight for each token: caches or draft tokens save some;" in faster
    ours = "  triolet float32              1.500 s (1.000 to 2.000); limit 0.010 s, 1 %; WER 100.0 %; "
    assert lines[2] == ours + "transformers' tokens; 2.00x of transformers float32"
    assert [line.equal for line in tables[0].lines] == [1.0, None, None]
    counted = [table.name for table in tables if all(line.counted == 3e6 for line in table.lines)]
    assert counted == ["thread"]
    assert "the thread counts 3.0 million/s" in "".join(lines)
    assert [line.ratios for line in tables[-1].lines] == [{}, {}, {}]
    assert tables[-1].lines[0].waits == {"p50": 1.0, "p95": 1.0, "p99": 1.0}
    told = json.loads(as_json(MACHINE, {"triolet float32": {"dtype": "float32"}}, tables))
    assert told["scenarios"][0]["lines"][0]["ratios"]["transformers float32"]["median"] == 2.0
    pytest.importorskip("matplotlib")
    plot(tables, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1_000


def test_waits_are_told_of_what_is_known():
    answers = [{"total": float(n), "first": None} for n in range(101)]
    assert waits_of(answers) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert waits_of([{"total": 1.0}]) == {}


def test_vectors_are_compared_with_those_of_transformers():
    """The least cosine is told: that of the worst vector."""
    ours = [{"vector": [1.0, 0.0]}, {"vector": [0.6, 0.8]}]
    theirs = [{"vector": [1.0, 0.0]}, {"vector": [0.8, 0.6]}]
    assert least_cosine(ours, theirs) == pytest.approx(0.96)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    for sample in demo.samples():
        if sample.language == "en":
            (folder / sample.path.name).write_bytes(sample.path.read_bytes())
            (folder / sample.path.name).with_suffix(".txt").write_text(sample.text)
    return folder


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("speech", 2, "--model is missing, and TRIOLET_REAL does not name a folder with whisper-base"),
        ("text --model /nowhere", 2, "--model: /nowhere is not a folder"),
        ("text /nowhere", 2, "--model: /nowhere is not a folder"),
        (f"text --model {__file__}", 1, "test_bench.py is a file; allowed: a checkpoint's folder or a hub id"),
        ("text a --model b", 2, "two models, a and --model b; give one of them"),
        ("speech --rounds 0", 2, "0 is not in the range"),
        ("text --variant int4", 2, "'int4' is not one of 'float32', 'bfloat16', 'int8'"),
        ("DEMO --peer openai", 2, "--peer openai; allowed: transformers, faster-whisper=FOLDER, openvino=FOLDER"),
        ("DEMO --peer faster-whisper", 2, "--peer faster-whisper; allowed: transformers, faster-whisper=FOLDER"),
        ("DEMO --peer transformers=a", 2, "--peer transformers=a; allowed: transformers, faster-whisper=FOLDER"),
        ("DEMO --peer faster-whisper=/nowhere", 2, "there is no /nowhere"),
        ("DEMO --peer openvino=/ --variant int8", 2, "--peer openvino=/: there is no /int8"),
        (
            "DEMO --peer transformers --variant int8",
            2,
            "--peer transformers computes in float32, and Triolet in int8; ",
        ),
        ("embed --model /nowhere", 2, "--model: /nowhere is not a folder"),
        ("DEMO --only two", 2, "--only 'two'; allowed: 'start', 'one', 'neighbour', 'thread'"),
        ("DEMO --only online --online 0", 2, "--only 'online'; allowed"),
        ("DEMO --json /nowhere/a.json", 1, "/nowhere/a.json: there is no folder /nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(run, words, status, told, recordings, capsys, monkeypatch):
    monkeypatch.delenv("TRIOLET_REAL", raising=False)
    words = words.replace("DEMO", f"speech --model {demo.checkpoint()} --audio {recordings}")
    assert run(*words.split()) == status
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "scenario", "played"),
    [("whisper", "trimmed", True), ("moonshine", "trimmed", False), ("moonshine", "reuse", False)],
)
def test_what_a_kind_of_speech_model_cannot_do_is_no_scenario(
    kind, scenario, played, run, recordings, tmp_path, capsys
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    words = ["--model", str(tmp_path), "--audio", str(recordings), "--only", scenario, "--json", "/nowhere/a.json"]
    assert run("speech", *words) == (1 if played else 2)
    assert ("there is no folder" if played else f"--only '{scenario}'; allowed") in capsys.readouterr().err


@pytest.mark.real_time
@pytest.mark.thorough
def test_a_contest_of_speech_from_the_command_to_the_json(run, recordings, tmp_path, capsys):
    """With the demo checkpoint: the engine in float32 writes transformers' tokens."""
    told = tmp_path / "told.json"
    words = ["--model", str(demo.checkpoint()), "--audio", str(recordings), "--peer", "transformers", "--rounds", "1"]
    words += ["--variant", "float32", "--online", "2", "--rate", "9", "--json", str(told), "--threads", "1"]
    words += [part for name in ("one", "together", "trimmed", "online") for part in ("--only", name)]
    assert run("speech", *words, "--seconds", "10", "--together", "2") == 0
    out = capsys.readouterr().out
    assert "one: one clip\n" in out
    found = json.loads(told.read_text())
    assert [table["name"] for table in found["scenarios"]] == ["one", "together", "trimmed", "online"]
    assert found["scenarios"][1]["lines"][0]["equal"] == 1.0
    assert set(found["contenders"]) == {"triolet float32", "transformers float32"}


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    """A BERT with random weights, whose tokens are letters."""
    tokenizer = BERT.make()
    config = BertConfig(**{**text_settings(tokenizer), "max_position_embeddings": 1_024})
    folder = tmp_path_factory.mktemp("minilm")
    save_checkpoint(folder, random_model(BertModel, config, 0), tokenizer)
    return folder


@pytest.mark.real_time
@pytest.mark.thorough
def test_a_contest_of_vectors_from_the_command_to_the_json(run, minilm, tmp_path, capsys):
    """Triolet's vectors have the directions of transformers'."""
    told = tmp_path / "told.json"
    words = [
        "--model",
        str(minilm),
        "--peer",
        "transformers",
        "--rounds",
        "1",
        "--variant",
        "float32",
        "--threads",
        "1",
    ]
    words += [part for name in ("one", "together", "tasks") for part in ("--only", name)]
    assert run("embed", *words, "--together", "9", "--json", str(told)) == 0
    assert "tasks: 9 tasks of one text each\n" in capsys.readouterr().out
    found = json.loads(told.read_text())["scenarios"]
    assert [table["name"] for table in found] == ["one", "together", "tasks"]
    assert all(line["cosine"] > 0.9999 and line["limit"] > 0 for table in found for line in table["lines"])
