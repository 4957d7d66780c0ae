"""What can be wrong with a draft, by name. Every text says which folder, which values, and what to do."""

from pathlib import Path

from tide_platform.config import TideError


class DraftError(TideError):
    """A draft folder that cannot be used; ``folder`` is the one meant."""

    def __init__(self, folder: Path, text: str):
        super().__init__(f"{folder}: {text}")
        self.folder = folder


class DraftIncomplete(DraftError):
    """A file or tensor that must be there is not."""

    def __init__(self, folder: Path, missing: list[str], mend: str = "export the draft again, whole"):
        super().__init__(folder, f"missing {', '.join(missing)}; {mend}")
        self.missing = missing


class DraftCorrupt(DraftError):
    """A file that cannot be read as what its name says."""

    def __init__(self, folder: Path, file: str, detail: str):
        super().__init__(folder, f"{file} cannot be read ({detail}); copy the folder again")
        self.file = file


class WrongArchitecture(DraftError):
    """Not an EAGLE3 draft (EAGLE-1/2 drafts look alike, but have no aux fusion and no vocabulary map)."""

    def __init__(self, folder: Path, found: str, mend: str):
        super().__init__(folder, f"architecture {found} is not EAGLE3; {mend}")
        self.found = found


class TooManyLayers(DraftError):
    """SGLang 0.5.14 and the trainer run EAGLE3 drafts of one layer."""

    def __init__(self, folder: Path, layers: int):
        super().__init__(
            folder, f"the draft has {layers} layers, EAGLE3 drafts here have exactly 1; use a one-layer draft"
        )
        self.layers = layers


class DraftMismatch(DraftError):
    """Draft and target do not belong together: ``what`` differs."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        what: str,
        draft_value: object,
        target_value: object,
        mend: str = "use a draft made for this target",
    ):
        super().__init__(folder, f"{what} is {draft_value}, the target {target} has {target_value}; {mend}")
        self.target, self.what = target, what
        self.draft_value, self.target_value = draft_value, target_value


class BadAuxLayers(DraftError):
    """The aux layer ids do not name three different layers of the target."""

    def __init__(self, folder: Path, ids: tuple[int, ...], target_layers: int):
        last = (
            f"{target_layers} is the output of the last layer, which Hugging Face gives after the final norm "
            "and SGLang before it; "
            if target_layers in ids
            else ""
        )
        super().__init__(
            folder,
            f"aux layer ids {list(ids)} (entry of layer i) must be three different ids in "
            f"1..{target_layers - 1}; {last}"
            "set eagle_config.eagle_aux_hidden_state_layer_ids (SGLang's numbering there: i - 1)",
        )
        self.ids, self.target_layers = ids, target_layers


class BadVocabularyMap(DraftError):
    """``d2t``/``t2d`` do not describe a map from the draft's vocabulary into the target's."""

    def __init__(self, folder: Path, detail: str):
        super().__init__(
            folder,
            f"vocabulary map d2t/t2d: {detail}; export the draft again with the map it was trained with",
        )
        self.detail = detail


class BadTensorShape(DraftError):
    """A tensor whose shape is not the one that ``config.json`` implies."""

    def __init__(self, folder: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]):
        super().__init__(
            folder,
            f"{name} has shape {list(found)}, config.json implies {list(expected)}; "
            "mend the config or export again",
        )
        self.name, self.found, self.expected = name, found, expected


class UnsupportedRope(DraftError):
    """A rotary embedding that the trainer does not compute as SGLang serves it."""

    def __init__(self, folder: Path, kind: str):
        super().__init__(
            folder,
            f"rope type {kind} is not supported; a draft's may be default, linear, dynamic, llama3 or yarn: "
            "give it one of these",
        )
        self.kind = kind
