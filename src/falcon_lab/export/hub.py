"""Send an exported drafter to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from falcon_lab.errors import FalconLabError, one_line
from falcon_lab.export.folder import read_origin


def push_folder(folder: Path, repository: str, *, private: bool, message: str | None) -> str:
    """Upload an exported drafter with its card; return its address.

    Args:
        folder: that ``Export.write`` has written.
        repository: its id on the hub, which is made where it is not there.
        private: whether only its owner sees a repository that is made.
        message: of the commit; None says what it is.

    Raises:
        FalconLabError: the folder is not whole, or the hub refuses it or cannot be reached.
    """
    origin = read_origin(folder)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    unreachable: type[Exception] = HfHubHTTPError.__bases__[
        0
    ]  # of the HTTP client that this version has
    api = HfApi(library_name="falcon-lab")
    said = message or f"Drafter for {origin.drafter['target']['name']}, as {origin.format} reads it"
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message=said)
    except OfflineModeIsEnabled as error:
        raise FalconLabError(
            f"{repository}: cannot be sent, as HF_HUB_OFFLINE is set; unset it"
        ) from error
    except (HfHubHTTPError, HFValidationError, unreachable) as error:
        raise FalconLabError(
            f"{repository}: the hub at {api.endpoint} did not take it ({one_line(error)}); log in "
            "with hf auth login, and see that the name and the network are right"
        ) from error
    return f"{api.endpoint}/{repository}"
