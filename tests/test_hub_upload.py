"""`prune --push-to-hub` against a fake Hub: checks before work, one upload, none unasked."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from ghostlayers.model_card import model_card

USER = {"name": "me", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}


@pytest.fixture
def hub(monkeypatch):
    """Replace the Hub's client; return what was called."""
    calls: list = []
    state = {"user": USER, "token": "hf_x", "fault": None}

    class FakeApi:
        def whoami(self):
            calls.append("whoami")
            if isinstance(state["user"], Exception):
                raise state["user"]
            return state["user"]

        def create_repo(self, repo, *, exist_ok):
            calls.append(("create", repo, exist_ok))

        def upload_folder(self, *, folder_path, repo_id, commit_message):
            if state["fault"]:
                raise state["fault"]
            calls.append(("upload", repo_id, sorted(p.name for p in Path(folder_path).iterdir())))
            return f"https://huggingface.co/{repo_id}/commit/1"

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeApi)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: state["token"])
    return calls, state


def flags(work, out, *more) -> list:
    text = ["--calibration", work / "t.txt", "--num-windows", "8", "--window", "32"]
    return ["prune", work / "m", "-o", out, "--layers", "3-4", *text, *more]


def test_uploads_the_finished_folder_once(work, run, tmp_path, hub):
    calls, _ = hub
    repo = "lab/small-pruned"
    status, out, err = run(*flags(work, tmp_path / "o", "--push-to-hub", repo, "--recover", "none"))
    assert (status, err) == (0, "")
    assert f"uploaded: https://huggingface.co/{repo}/commit/1" in out
    names = sorted(path.name for path in (tmp_path / "o").iterdir())
    assert calls == ["whoami", ("create", repo, True), ("upload", repo, names)]
    assert {"README.md", "config.json", "model.safetensors", "ghostlayers.json"} <= set(names)


def test_nothing_is_uploaded_or_asked_without_the_flag(work, run, tmp_path, hub):
    assert run(*flags(work, tmp_path / "o", "--recover", "none"))[0] == 0
    assert hub[0] == []


@pytest.mark.parametrize(
    ("repo", "change", "words"),
    [
        ("no name/x", {}, "no name"),
        ("alone", {}, "owner/name"),
        ("me/x", {"token": None}, "no token"),
        ("me/x", {"user": OSError("401 Unauthorized")}, "401 Unauthorized"),
        ("them/x", {}, "me, lab, not to them"),
        ("me/x", {"user": {**USER, "auth": {"accessToken": {"role": "read"}}}}, "only read"),
    ],
)
def test_faults_are_found_before_the_work(work, refuse, tmp_path, hub, repo, change, words):
    calls, state = hub
    state |= change
    assert words in refuse(tmp_path, *flags(work, tmp_path / "o", "--push-to-hub", repo))
    assert [call for call in calls if call != "whoami"] == []


def test_a_failed_upload_keeps_the_folder(work, run, tmp_path, hub):
    hub[1]["fault"] = OSError("connection lost")
    more = ["--push-to-hub", "me/x", "--recover", "none"]
    status, _, err = run(*flags(work, tmp_path / "o", *more))
    assert status == 2 and len(err.splitlines()) == 1 and "connection lost" in err
    assert (tmp_path / "o" / "config.json").is_file()


def test_card_shows_what_the_guard_measured():
    record = {
        "num_layers": 4, "removed": [2], "kept": [0, 1, 3], "selector": "layers",
        "recover": "ghost-robust", "boundaries": [{"start": 2, "stop": 3, "operator": "none"}],
        "source": {"model": "org/model"},
        "guard": {"windows": 5, "loss_dense": 2.0, "loss_none": 3.0, "loss_chosen": 2.5},
    }  # fmt: skip
    card = model_card(record)
    assert "base_model: org/model" in card
    for row in ("| dense | 7.39 | 1.000 |", "| pruned | 20.09 | 2.718 |"):
        assert row in card
    assert "| this model | 12.18 | 1.649 |" in card and "5 calibration windows" in card
    assert "perplexity" not in model_card({**record, "guard": None})
