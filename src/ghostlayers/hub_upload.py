"""Upload a finished checkpoint to the Hugging Face Hub. Nothing is uploaded unless asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import CheckpointError, one_line


def check_push(repo: str) -> None:
    """Check, before any work, that a repository can be written with this machine's token.

    Args:
        repo: ``owner/name`` on the Hub; it need not exist yet.

    Raises:
        CheckpointError: If the name is no repository name, there is no token, the Hub does not
            answer or refuses the token, or the owner is another one than the token's user and the
            organizations it may write to.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CheckpointError(one_line(f"--push-to-hub {repo!r} is no name", error)) from error
    if repo.count("/") != 1:
        raise CheckpointError(f"--push-to-hub {repo!r}: give owner/name, such as me/model-pruned.")
    if not get_token():
        raise CheckpointError(
            f"--push-to-hub {repo!r}: no token on this machine. Run `hf auth login` or set "
            "HF_TOKEN."
        )
    try:
        user: dict[str, Any] = dict(HfApi().whoami())
    except Exception as error:  # the client, its transport and its offline mode have many classes
        raise CheckpointError(
            one_line(f"--push-to-hub {repo!r}: the Hub refuses the token or is away", error)
        ) from error
    owners = [user.get("name"), *(org.get("name") for org in user.get("orgs") or [])]
    owner = repo.split("/")[0]
    if owner not in owners:
        raise CheckpointError(
            f"--push-to-hub {repo!r}: the token's user may write to "
            f"{', '.join(str(name) for name in owners)}, not to {owner}."
        )
    access = (user.get("auth") or {}).get("accessToken") or {}
    if access.get("role") == "read":
        raise CheckpointError(
            f"--push-to-hub {repo!r}: the token may only read. Make one that may write."
        )


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload a checkpoint folder in one commit; the repository is made if there is none.

    Args:
        folder: A complete checkpoint.
        repo: ``owner/name``.

    Returns:
        Address of the commit.

    Raises:
        CheckpointError: If the upload fails; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, exist_ok=True)
        commit = api.upload_folder(
            folder_path=folder, repo_id=repo, commit_message="Add depth-pruned model"
        )
    except Exception as error:  # see above
        raise CheckpointError(
            one_line(f"--push-to-hub {repo!r}: the upload failed; {folder} is complete", error)
        ) from error
    return str(getattr(commit, "commit_url", commit))
