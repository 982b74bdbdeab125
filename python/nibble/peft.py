"""nibble for PEFT: LoRA adapters on layers whose weights stay quantized.

    import nibble.peft
    config = nibble.peft.register(LoraConfig(target_modules=["q_proj", "v_proj"]))
    model = get_peft_model(model, config)                    # of a model that nibble.torch.convert() or nibble.transformers made
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from nibble.errors import Unsupported
from nibble.torch import QuantLinear

__all__ = ["LoraLinear", "register"]


def __dir__() -> list[str]:
    return __all__


def register(config: LoraConfig) -> LoraConfig:
    """Lets a LoraConfig take QuantLinear layers too; returns it.

    PEFT does not save that with the adapter: PeftModel.from_pretrained(model, path, config=register(LoraConfig.from_pretrained(path))).
    """
    config._register_custom_module({QuantLinear: LoraLinear})
    return config


class LoraLinear(nn.Module, LoraLayer):  # type: ignore[misc]
    """y = base_layer(x) + Σ scaling · B(A(dropout(x))) over the active adapters; base_layer is a QuantLinear, which is not trained.

    Raises ValueError for variants of LoRA (DoRA, ...), Unsupported from merge(): a merged weight would have to be quantized again.
    """

    def __init__(
        self, base_layer: QuantLinear, adapter_name: str, config: LoraConfig, r: int = 0, lora_alpha: int = 1, **options: Any
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in_features] → y [..., out_features]."""
        y = self.base_layer(x)
        if self.disable_adapters:
            return y
        for name in self.active_adapters:
            if name in self.lora_A:
                a = self.lora_A[name]
                change = self.lora_B[name](a(self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype)))) * self.scaling[name]
                y = y + change.to(y.dtype)
        return y

    def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
        """Raises Unsupported."""
        raise Unsupported("an adapter cannot be merged into a quantized weight without rounding it again; keep the adapter beside it")

    def unmerge(self) -> None:
        """Raises Unsupported."""
        raise Unsupported("no adapter has been merged")

    def __repr__(self) -> str:
        return "lora." + super().__repr__()
