"""What remains of the symmetry in models as they are in use, and what tracing them costs.

The models are those of `transformers`, `peft`, `torch_geometric` and `stable_baselines3` (`pip
install -e '.[tools]'`) at the sizes that they were published in, with random weights, the Llamas
without any (on the meta device); nothing is downloaded. Every one is traced in a process of its
own: CPU time of one thread, and how far memory rises above the model. A weight has a free scale if
a unit class stands at either of its ends.

    python benchmarks/trace_models.py
    python benchmarks/trace_models.py --cases gpt2 llama-1b
"""

# pyright: reportMissingImports=false
# the libraries whose models these are come with the extra "tools"

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pathspace as ps
from trace_cost import peak, print_each

Made = tuple[nn.Module, Any]


def words(steps: int = 16) -> Tensor:
    return torch.zeros(2, steps, dtype=torch.long)


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(2, 3, 224, 224)}


def of(name: str, config: str, inputs: dict[str, Tensor], **options: Any) -> Callable[[], Made]:
    """A model of `transformers`, of the size that its configuration has by default."""

    def build() -> Made:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options)).eval(), inputs

    return build


def detr() -> Made:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    options: dict[str, Any] = {"out_features": ["stage4"]}
    backbone = ResNetConfig(**options)
    options = {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone_config": backbone,
    }
    config = DetrConfig(**options)
    return DetrForObjectDetection(config).eval(), images()


def transformer() -> Made:
    model = nn.Transformer(batch_first=True).eval()
    return model, (torch.zeros(2, 16, 512), torch.zeros(2, 16, 512))


def lora() -> Made:
    from peft import LoraConfig, get_peft_model

    model, inputs = MODELS["gpt2"]()
    config = LoraConfig(r=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(model, config).eval(), inputs  # type: ignore[arg-type]


class Graph(nn.Module):
    """Two convolutions of a graph of the size of Cora."""

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second = GCNConv(1433, 16), GCNConv(16, 7)
        self.edges = nn.Buffer(torch.randint(2708, (2, 10556)))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, self.edges).relu(), self.edges)


def policy() -> Made:
    from gymnasium import spaces
    from stable_baselines3.common.policies import ActorCriticPolicy

    box, actions = spaces.Box(-1, 1, (17,)), spaces.Box(-1, 1, (6,))
    model = ActorCriticPolicy(
        box, actions, lambda _: 3e-4, activation_fn=nn.ReLU, net_arch=[256, 256]
    )
    return model, torch.zeros(2, 17)


def wide_mlp() -> Made:
    layers = [part for _ in range(4) for part in (nn.Linear(16384, 16384), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.zeros(2, 16384, device="cpu")


LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TEXT = {"input_ids": words()}
TWO_TEXTS = {"input_ids": words(), "decoder_input_ids": words()}
SOUND = {"input_features": torch.zeros(2, 80, 3000), "decoder_input_ids": words()}
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": of("GPT2LMHeadModel", "GPT2Config", TEXT),
    "llama-1b": of("LlamaForCausalLM", "LlamaConfig", TEXT, **LLAMA_1B),
    "llama-7b": of("LlamaForCausalLM", "LlamaConfig", TEXT),
    "opt-125m": of("OPTForCausalLM", "OPTConfig", TEXT),
    "t5-small": of("T5ForConditionalGeneration", "T5Config", TWO_TEXTS, decoder_start_token_id=0),
    "bert": of("BertForMaskedLM", "BertConfig", TEXT),
    "vit-b16": of("ViTForImageClassification", "ViTConfig", images()),
    "whisper-tiny": of("WhisperForConditionalGeneration", "WhisperConfig", SOUND),
    "wav2vec2": of("Wav2Vec2ForCTC", "Wav2Vec2Config", {"input_values": torch.zeros(2, 16000)}),
    "convnext-t": of("ConvNextForImageClassification", "ConvNextConfig", images()),
    "mobilenet-v2": of("MobileNetV2ForImageClassification", "MobileNetV2Config", images()),
    "resnet-50": of("ResNetForImageClassification", "ResNetConfig", images()),
    "detr": detr,
    "transformer": transformer,
    "gpt2-lora": lora,
    "gcn-cora": lambda: (Graph(), torch.zeros(2708, 1433)),
    "policy": policy,
    "mlp-1b": wide_mlp,
}
WITHOUT_WEIGHTS = ("llama-1b", "llama-7b", "mlp-1b")


def measure(name: str) -> dict[str, object]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with torch.device("meta" if name in WITHOUT_WEIGHTS else "cpu"):
        model, inputs = MODELS[name]()
    before, start = peak(), time.process_time()
    network = ps.trace(model, inputs)
    seconds, megabytes = time.process_time() - start, peak() - before
    free = 0
    for key, edges in network.edges.items():
        free += int(
            ((edges.target != 0) | (edges.source != 0)).expand(network.parameters[key].shape).sum()
        )
    size = sum(p.numel() for p in model.parameters())
    return {
        "model": name,
        "parameters": size,
        "free": round(free / size, 3),
        "classes": network.num_classes,
        "cuts": sorted({cut.operation for cut in network.cuts if cut.counts}),
        "seconds": round(seconds, 1),
        "megabytes": round(megabytes),
    }


if __name__ == "__main__":
    print_each(MODELS, measure, __file__, __doc__)
