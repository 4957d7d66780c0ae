"""What samples of a deployment have in common, known before its server ever ran."""

from pathlib import Path

from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings
from tide_platform.draft.check import check_draft
from tide_platform.draft.config import default_aux_layer_ids, read_config, text_config
from tide_platform.serving.drafts import deployed_draft
from tide_platform.store.hidden_states import HiddenStates


def stream_for(settings: Settings, store: HiddenStates, folder: Path, digest: str) -> StreamMeta:
    """Layers and K of the dataset where there is one; else those of the deployment's draft and settings; else
    the layers that SGLang, and a draft of ``tide draft init``, take by themselves.

    ``folder``, ``digest``: the target. Raises what is wrong with the draft (:class:`DraftError`).
    """
    config = text_config(read_config(folder))
    teacher_k = settings.capture.teacher_k
    if store.tip().version:
        there = store.stream_meta()
        layers, teacher_k = there.aux_layer_ids, there.teacher_k
    elif draft := deployed_draft(settings) or settings.draft:
        layers = check_draft(draft, folder).aux_layer_ids
    else:
        layers = default_aux_layer_ids(config["num_hidden_layers"])
    return StreamMeta(digest, config["hidden_size"], config["vocab_size"], layers, teacher_k)
