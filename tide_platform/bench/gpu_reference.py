"""What transformers computes where SGLang's rows were captured.

``python -m tide_platform.bench.gpu_reference TARGET TOKENS.npz OUT.npz LAYER,LAYER,LAYER``: tokens of each
sample by name; out ``NAME.aux`` float32 [T, 3H] and ``NAME.best`` [T], the most likely next token. The layers
are SGLang's numbering, the entry of a layer, which is ``hidden_states[layer]``.
"""

import sys
from typing import Any

import numpy as np
import torch


def main() -> None:
    from transformers import AutoModelForCausalLM

    target, tokens, out, layers = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    model = model.to(device).eval()
    found: dict[str, Any] = {}
    with torch.no_grad(), np.load(tokens) as given:
        for name in given.files:
            ids = torch.from_numpy(given[name].astype(np.int64))[None].to(device)
            result = model(ids, output_hidden_states=True)
            states = [result.hidden_states[int(layer)][0] for layer in layers.split(",")]
            found[f"{name}.aux"] = torch.cat(states, -1).float().cpu().numpy()
            found[f"{name}.best"] = result.logits[0].argmax(-1).cpu().numpy()
    np.savez(out, **found)


if __name__ == "__main__":
    main()
