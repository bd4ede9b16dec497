"""Tasks through the harness: independent oracles, the BOS rule, pairing, and what is not run."""

from __future__ import annotations

import json
import math
import random
import sys

import numpy
import pytest
import torch
from tokenizers import processors

import ghostlayers as gl
from conftest import packaged_gguf
from ghostlayers.loading import load_model, load_tokenizer, locate
from ghostlayers.task_scores import TaskResults, TaskScore
from ghostlayers.tasks import PAPER_TASKS, task_names
from oracles import tiny_model
from tiny_checkpoints import text_of, tiny_tokenizer

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from ghostlayers.harness_model import HarnessModel

ITEMS = [
    {
        "question": text_of(4 + seed, seed),
        "choices": [text_of(1 + (seed + c) % 3, 50 + seed + 9 * c) for c in range(3)],
        "answer": seed % 3,
    }
    for seed in range(9)
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
  cache_dir: {cache}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
{metrics}
metadata:
  version: 3.0
"""


def write_task(folder, name, items=ITEMS, metrics=("acc", "acc_norm"), data=None) -> None:
    file = folder / f"{name}.jsonl"
    if data is None:
        file.write_text("\n".join(map(json.dumps, items)))
    lines = "".join(
        f"  - metric: {m}\n    aggregation: mean\n    higher_is_better: true\n" for m in metrics
    )
    text = TASK.format(name=name, data=data or file, cache=folder / "cache", metrics=lines)
    (folder / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Tasks: words (acc, acc_norm), plain (acc), and gone, whose data are not there."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "words")
    write_task(folder, "plain", ITEMS[:5], metrics=("acc",))
    write_task(folder, "gone", data=folder / "nowhere.jsonl")
    return folder


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def log_likelihood(model, context, continuation) -> float:
    """Oracle: a plain forward pass, no padding and no harness."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        scores = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    steps = range(len(context) - 1, ids.shape[1] - 1)
    return float(sum(scores[i, ids[0, i + 1]] for i in steps))


def oracle_values(model, bos):
    encode = tiny_tokenizer()
    found = {"acc": [], "acc_norm": []}
    for item in ITEMS:
        context = [1] * bos + encode(item["question"]).input_ids
        scores = [
            log_likelihood(model, context, encode(" " + choice).input_ids)
            for choice in item["choices"]
        ]
        by_length = [s / len(c) for s, c in zip(scores, item["choices"], strict=True)]
        for metric, values in (("acc", scores), ("acc_norm", by_length)):
            best = max(range(3), key=values.__getitem__)
            found[metric].append(float(best == item["answer"]))
    return found


def adding_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 2)]
    )
    return tokenizer


@pytest.mark.parametrize("kind", ["no BOS", "BOS", "EOS behind"])
def test_accuracies_are_those_of_plain_forward_passes(model, local, kind):
    """CASES 58: BOS as the tokenizer adds it, checked by its effect; EOS never ends a context."""
    tokenizer = {
        "no BOS": tiny_tokenizer(),
        "BOS": tiny_tokenizer(True),
        "EOS behind": adding_eos(),
    }
    results = gl.evaluate_tasks(model, tokenizer[kind], "words", include_path=local, batch_size=4)
    expected = oracle_values(model, bos=kind == "BOS")
    score = results.scores["words"]
    assert {metric: list(values) for metric, values in score.values.items()} == expected
    harness = HarnessModel(model, tokenizer[kind], 1)
    encode, item = tiny_tokenizer(), ITEMS[0]
    context = [1] * (kind == "BOS") + encode(item["question"]).input_ids
    rest = encode(" " + item["choices"][1]).input_ids
    assert harness._encode_pair(item["question"], " " + item["choices"][1]) == (context, rest)
    found = results.to_dict()
    assert found["bos"] is (kind == "BOS")
    (row,) = found["scores"]
    assert (row["task"], row["items"], row["num_fewshot"], row["version"]) == ("words", 9, 0, 3.0)
    for metric in ("acc", "acc_norm"):
        assert row[metric]["value"] == pytest.approx(numpy.mean(expected[metric]))
        error = numpy.std(expected[metric], ddof=1) / 3
        assert row[metric]["stderr"] == pytest.approx(error)


def test_bos_changes_the_scores(model):
    """The oracle above tells the two rules apart."""
    context, continuation = [9, 8, 7], [6, 5]
    with_bos = log_likelihood(model, [1, *context], continuation)
    assert abs(with_bos - log_likelihood(model, context, continuation)) > 1e-2


REQUESTS = [
    (("", ""), list(range(5, 5 + length)), list(range(60, 60 + 1 + length % 4)))
    for length in (3, 30, 7, 19, 2, 11, 25, 8, 14)
]


def likelihoods(model, tokenizer, batch_size, requests=REQUESTS):
    harness = HarnessModel(model, tokenizer, batch_size)
    return [value for value, _ in harness._loglikelihood_tokens(requests, disable_tqdm=True)]


@pytest.mark.parametrize("recover", ["ghost", "ghost-robust"])
def test_in_memory_and_reloaded_agree(model, local, tmp_path, recover):
    """CASES 59: the object scores as its checkpoint does, and the operator is in both."""
    ids = torch.randint(3, 256, (16, 48), generator=torch.Generator().manual_seed(0))
    tokenizer = tiny_tokenizer()
    result = gl.prune(model, tokenizer, windows=ids, layers="2-4", recover=recover)
    gl.save_pruned(result, tmp_path / "out")
    loaded = gl.load_pruned(tmp_path / "out")
    one = gl.evaluate_tasks(result.model, tokenizer, "words,plain", include_path=local)
    two = gl.evaluate_tasks(loaded.model, loaded.tokenizer, "words,plain", include_path=local)
    assert one.scores == two.scores and one.protocol == two.protocol
    bare = gl.prune(model, tokenizer, windows=ids, layers="2-4", recover="none").model
    memory, reloaded, none = (
        likelihoods(each, tokenizer, 1) for each in (result.model, loaded.model, bare)
    )
    assert memory == pytest.approx(reloaded, abs=1e-4)
    if recover == "ghost":
        assert max(abs(a - b) for a, b in zip(memory, none, strict=True)) > 1e-2


@pytest.mark.parametrize("bias", [False, True])
def test_batch_size_and_padding_side_change_nothing(model, bias):
    """CASES 60."""
    ids = torch.randint(3, 256, (16, 48), generator=torch.Generator().manual_seed(0))
    pruned = gl.prune(model, tiny_tokenizer(), windows=ids, layers="2-4", recover="ghost").model
    if bias:
        operators = [m for n, m in pruned.named_modules() if n.endswith("ghost_input")]
        assert len(operators) == 1
        operators[0].bias = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    expected = [log_likelihood(pruned, context, rest) for _, context, rest in REQUESTS]
    for batch_size in (1, 8):
        found = likelihoods(pruned, tiny_tokenizer(), batch_size)
        assert found == pytest.approx(expected, abs=1e-4)
    longest = max(len(context) + len(rest) for _, context, rest in REQUESTS)
    for side in ("left", "right"):
        tokenizer = tiny_tokenizer()
        tokenizer.padding_side = side
        rows = [{"input_ids": context + rest} for _, context, rest in REQUESTS]
        batch = tokenizer.pad(rows, return_tensors="pt")
        assert batch.input_ids.shape[1] == longest
        with torch.no_grad():
            scores = pruned(**batch, use_cache=False).logits.double().log_softmax(-1)
        for row, (_, context, rest) in enumerate(REQUESTS):
            offset = longest - len(context) - len(rest) if side == "left" else 0
            places = range(offset + len(context) - 1, offset + len(context) + len(rest) - 1)
            value = sum(float(scores[row, p, batch.input_ids[row, p + 1]]) for p in places)
            assert value == pytest.approx(expected[row], abs=1e-4)


@pytest.mark.parametrize("bos", [False, True])
def test_a_context_that_is_too_long_keeps_its_bos(model, bos):
    """CASES 58: BOS at the start of every window."""
    words = [(7 * i) % 250 + 4 for i in range(600)]
    context, rest = [1] * bos + words, [50, 60, 70]
    kept = [1] * bos + words[-(512 + 1 - len(rest) - bos) :]
    assert len(kept) + len(rest) == 513  # the last token is only predicted
    (found,) = likelihoods(model, tiny_tokenizer(bos), 1, [(("", ""), context, rest)])
    ids = torch.tensor([(kept + rest)[:-1]])
    with torch.no_grad():
        scores = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    expected = sum(float(scores[i - 3, token]) for i, token in enumerate(rest))
    assert found == pytest.approx(expected, abs=1e-4)


def test_limit_and_fewshot(model, local):
    found = gl.evaluate_tasks(model, tiny_tokenizer(), "words", include_path=local, limit=4)
    whole = gl.evaluate_tasks(model, tiny_tokenizer(), "words", include_path=local)
    assert found.scores["words"].values["acc"] == whole.scores["words"].values["acc"][:4]
    assert found.to_dict()["limit"] == 4 and len(found.scores["words"].items) == 4
    single = gl.evaluate_tasks(model, tiny_tokenizer(), "words", include_path=local, limit=1)
    assert single.to_dict()["scores"][0]["acc"]["stderr"] is None


def test_examples_in_front_of_items(model, local):
    """Drawn from the harness's own seed; the number of one run does not stay for the next."""
    contexts = []
    for count in (2, 2, None):
        tasks = gl.load_tasks("words", include_path=local, num_fewshot=count)
        found = gl.evaluate_tasks(model, tiny_tokenizer(), tasks)
        assert found.scores["words"].num_fewshot == (count or 0)
        contexts.append([each.args[0] for each in tasks.tasks["words"].instances])
    assert contexts[0] == contexts[1] and len(contexts[0]) == 27
    for long, short in zip(contexts[0], contexts[2], strict=True):
        assert long.endswith("\n\n" + short) and long.count("\n\n") == 2


def test_a_task_that_fixes_its_examples_keeps_them(tmp_path):
    write_task(tmp_path, "words")
    file = tmp_path / "words.yaml"
    file.write_text(file.read_text() + "num_fewshot: 0\n")
    loaded = gl.load_tasks("words", include_path=tmp_path, num_fewshot=2)
    assert loaded.tasks["words"].get_config("num_fewshot") == 0


def test_a_tag_stands_for_its_tasks(tmp_path):
    """One task without data does not hide the others of its tag."""
    for name, data in (("one", None), ("two", tmp_path / "nowhere.jsonl")):
        write_task(tmp_path, name, data=data)
        file = tmp_path / f"{name}.yaml"
        file.write_text(file.read_text() + "tag: both\n")
    loaded = gl.load_tasks("both", include_path=tmp_path)
    assert list(loaded.tasks) == ["one"] and list(loaded.not_run) == ["two"]


def test_nothing_of_the_caller_changes(model, local):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    model.train()
    random.seed(3), numpy.random.seed(3)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    try:
        gl.evaluate_tasks(model, tokenizer, "plain", include_path=local)
        assert model.training and tokenizer.pad_token is None
    finally:
        model.eval()
    assert random.getstate() == before[0] and numpy.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_logits_that_are_not_finite_are_no_score(local):
    broken = tiny_model()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(gl.CalibrationError, match="not finite in float32"):
        gl.evaluate_tasks(broken, tiny_tokenizer(), "plain", include_path=local)


# What is not run, and names.


def test_a_task_without_its_data_is_not_run_and_the_average_says_so(model, local):
    """CASES 62: neither 0 nor left out silently."""
    results = gl.evaluate_tasks(model, tiny_tokenizer(), "words,gone,plain", include_path=local)
    found = results.to_dict()
    assert [row["task"] for row in found["scores"]] == ["words", "plain"]
    assert list(found["not_run"]) == ["gone"] and "nowhere.jsonl" in found["not_run"]["gone"]
    words, plain = found["scores"]
    average = found["average"]["acc"]
    assert average["value"] == pytest.approx((words["acc"]["value"] + plain["acc"]["value"]) / 2)
    error = math.hypot(words["acc"]["stderr"], plain["acc"]["stderr"]) / 2
    assert average["stderr"] == pytest.approx(error)
    assert (average["tasks"], average["not_run"]) == (["words", "plain"], ["gone"])
    assert plain["acc_norm"] is None
    mixed = (words["acc_norm"]["value"] + plain["acc"]["value"]) / 2
    assert found["average"]["acc_norm"]["value"] == pytest.approx(mixed)


def test_a_task_without_accuracy_is_not_run(tmp_path):
    write_task(tmp_path, "words")
    write_task(tmp_path, "other", metrics=("brier_score",))
    loaded = gl.load_tasks("words,other", include_path=tmp_path)
    assert list(loaded.tasks) == ["words"]
    assert loaded.not_run == {"other": "it measures brier_score, no accuracy"}


def test_no_task_at_all_is_an_error(model, local):
    with pytest.raises(gl.GhostlayersError, match=r"no task can be run: gone.*nowhere"):
        gl.evaluate_tasks(model, tiny_tokenizer(), "gone", include_path=local)


def test_names():
    paper = ["arc_easy", "arc_challenge", "hellaswag", "winogrande", "boolq"]
    paper += ["openbookqa", "rte", "copa", "race"]
    assert list(PAPER_TASKS) == paper == task_names("paper")
    assert task_names(" piqa, paper,arc_easy") == ["piqa", *paper]
    with pytest.raises(gl.GhostlayersError, match="names of lm-evaluation-harness"):
        task_names(" , ")


def test_the_harness_knows_the_tasks_of_the_papers():
    """And a name that it does not know is an error before any model is loaded."""
    with pytest.raises(gl.GhostlayersError, match=r"'arc_eazy'. Did you mean 'arc_easy'\?"):
        gl.load_tasks(["paper", "arc_eazy"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"limit": 0}, "`limit` is 0"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"num_fewshot": -1}, "`num_fewshot` is -1"),
        ({"include_path": "no/where"}, "'no/where' is no folder"),
    ],
)
def test_wrong_settings(model, local, settings, message):
    with pytest.raises(gl.GhostlayersError, match=message):
        gl.evaluate_tasks(model, tiny_tokenizer(), "words", **{"include_path": local, **settings})


# Numbers.


def planted(task="a", items=((0, "x"), (1, "y"), (2, "z"), (3, "w")), **values) -> TaskScore:
    return TaskScore(task, items, values)


def results_of(*scores) -> TaskResults:
    return TaskResults({score.task: score for score in scores}, {}, {"limit": None})


def test_paired_comparison():
    """Differences item by item: 0, -1, 0, -1; unpaired errors would be far larger."""
    dense = results_of(planted(acc=(1.0, 1.0, 0.0, 1.0)))
    pruned = results_of(planted(acc=(1.0, 0.0, 0.0, 0.0)))
    (row,) = pruned.to_dict(dense)["scores"]
    found = row["acc"]
    assert (found["value"], found["difference"]) == (0.25, -0.5)
    assert found["difference_stderr"] == pytest.approx(math.sqrt(1 / 3) / 2)
    assert found["retained"] == pytest.approx(0.25 / 0.75)
    same = dense.to_dict(dense)["scores"][0]["acc"]
    assert (same["difference"], same["difference_stderr"], same["retained"]) == (0, 0, 1)


def test_average_of_tasks_and_its_error():
    dense = results_of(planted(acc=(1.0,) * 4), planted("b", acc=(1.0, 0.0, 1.0, 0.0)))
    pruned = results_of(planted(acc=(1.0, 1.0, 0.0, 0.0)), planted("b", acc=(0.0, 0.0, 1.0, 1.0)))
    found = pruned.to_dict(dense)["average"]["acc"]
    assert (found["value"], found["difference"]) == (0.5, -0.25)
    one = numpy.std([0, 0, -1, -1], ddof=1) / 2
    two = numpy.std([-1, 0, 0, 1], ddof=1) / 2
    assert found["difference_stderr"] == pytest.approx(math.hypot(one, two) / 2)
    assert found["retained"] == pytest.approx(0.5 / 0.75)


def test_other_items_are_not_compared():
    one, two = planted(acc=(1.0, 0.0, 1.0, 0.0)), planted(items=((0, "x"),), acc=(1.0,))
    with pytest.raises(gl.GhostlayersError, match=r"other items \(4 and 1\)"):
        results_of(one).to_dict(results_of(two))
    with pytest.raises(gl.GhostlayersError, match="cannot be compared"):
        results_of(one).to_dict(results_of(planted("b", acc=(1.0,))))


# The command line.


def test_eval_of_two_checkpoints(work, run, local, tmp_path):
    flags = ["--calibration", work / "t.txt", "--num-windows", 8, "--window", 32]
    assert run("prune", work / "m", "-o", tmp_path / "p", "--layers", "2-4", *flags)[0] == 0
    target = tmp_path / "e.json"
    flags = ["--tasks", "words,gone,plain", "--include-path", local, "--json", target]
    status, out, err = run("eval", work / "m", tmp_path / "p", *flags)
    assert status == 0 and "task gone is not run" in err
    dense, pruned = json.loads(target.read_text())["results"]
    assert "perplexity" not in dense and dense["tasks"]["average"]["acc"]["retained"] == 1.0
    loaded = gl.load_pruned(tmp_path / "p")
    api = gl.evaluate_tasks(loaded.model, loaded.tokenizer, "words,plain", include_path=local)
    values = [row["acc"]["value"] for row in pruned["tasks"]["scores"]]
    assert values == [row["acc"]["value"] for row in api.to_dict()["scores"]]
    for row in pruned["tasks"]["scores"]:
        other = next(r for r in dense["tasks"]["scores"] if r["task"] == row["task"])
        difference = row["acc"]["value"] - other["acc"]["value"]
        assert row["acc"]["difference"] == pytest.approx(difference)
    assert "without gone (not run)" in out and "not run" in out
    assert f"{100 * values[0]:.1f} ±" in out


def test_perplexity_and_tasks_in_one_call(work, run, local, tmp_path):
    flags = ["--perplexity", work / "t.txt", "--num-windows", 2, "--window", 16]
    flags += ["--tasks", "plain", "--include-path", local, "--limit", 2]
    assert run("eval", work / "m", *flags, "--json", tmp_path / "e.json")[0] == 0
    (found,) = json.loads((tmp_path / "e.json").read_text())["results"]
    assert found["perplexity"] > 1 and found["tasks"]["scores"][0]["items"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "3"], "--limit needs --tasks"),
        (["--tasks", "words", "--limit", "0"], "`limit` is 0"),
        (["--tasks", ","], "`tasks` is ','"),
        (["--tasks", "words", "--include-path", "no/where"], "is no folder"),
    ],
)
def test_wrong_flags(work, refuse, tmp_path, flags, message):
    assert message in refuse(tmp_path, "eval", work / "m", *flags)


def test_without_the_harness(work, refuse, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    err = refuse(tmp_path, "eval", work / "m", "--tasks", "paper")
    assert "pip install 'ghostlayers[eval]'" in err


# The shared task files.


def test_shared_task_files(model, shared, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(shared / "data")  # their paths are relative
    names = ["local_copa", "local_arc_easy"]
    found = gl.evaluate_tasks(model, tiny_tokenizer(), names, include_path="lm_eval_tasks", limit=3)
    assert list(found.scores) == names and not found.not_run
    assert set(found.scores["local_copa"].values) == {"acc"}
    assert all(len(score.items) == 3 for score in found.scores.values())


@pytest.mark.real_model
def test_accuracy_of_a_real_model(shared, monkeypatch, tmp_path):
    """SmolLM2 on 40 items: the value measured with the harness's own command is 0.575."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.chdir(shared / "data")
    source = locate(str(packaged_gguf("smollm2")))
    found = gl.evaluate_tasks(
        load_model(source, device="cpu"),
        load_tokenizer(source),
        "local_copa",
        include_path="lm_eval_tasks",
        limit=40,
        batch_size=8,
    )
    assert found.to_dict()["average"]["acc"]["value"] == pytest.approx(0.575, abs=0.026)
