"""SyncBatchNorm: batch normalisation with the statistics of the joined batch of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from pycoll import collectives


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose means and variances are those of the batches of all ranks together.

    Every sample counts once, wherever it is: ranks may have batches of different sizes, spatial sizes too, or empty
    ones. Statistics are float32 (float64 for float64 inputs) whatever the input's dtype. In evaluation with running
    statistics, and in a group of one, it is plain batch normalisation and no rank waits for another.

    Gradients of weight and bias are of this rank's samples, to be averaged by DistributedDataParallel.

    Args:
        num_features: C of inputs (N, C, …); 2 dims at least.
        eps, momentum, affine, track_running_stats: as in ``torch.nn.BatchNorm1d``.
        process_group: of pycoll's backend; None: the default group.

    Raises (in forward):
        ValueError: the input has fewer than 2 dims.
        RuntimeError: the group's ranks disagree (named by the group).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, …) to the same shape and dtype. Collective where batch statistics are used."""
        self._check_input_dim(input)
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        group: Any = None
        if uses_batch and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
        if group is None or dist.get_world_size(group) == 1:
            return self._forward_alone(input, uses_batch)
        settings = _Settings(self.eps, self.momentum, group)
        if not self.training:
            return _SyncBatchNormFunction.apply(
                input, self.weight, self.bias, None, None, None, settings
            )
        return _SyncBatchNormFunction.apply(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.num_batches_tracked,
            settings,
        )

    def _forward_alone(self, input: Tensor, uses_batch: bool) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        tracks = self.training and self.track_running_stats
        if tracks and self.num_batches_tracked is not None and input.numel():
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        if uses_batch and input.numel() == 0:
            # Nothing to take statistics of; running ones stay.
            return F.batch_norm(
                input,
                input.new_zeros(self.num_features, dtype=_accumulate_dtype(input)),
                input.new_ones(self.num_features, dtype=_accumulate_dtype(input)),
                self.weight,
                self.bias,
                False,
                0.0,
                self.eps,
            )
        use_running = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if use_running else None,
            self.running_var if use_running else None,
            self.weight,
            self.bias,
            uses_batch,
            factor,
            self.eps,
        )

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | None = None
    ) -> nn.Module:
        """`module` with every ``BatchNorm*d`` in it replaced by a SyncBatchNorm with the same parameters and buffers.

        Returns:
            `module` itself, or the new layer if it is a batch normalisation.
        """
        converted: nn.Module = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            for name, value in [*module._parameters.items(), *module._buffers.items()]:
                setattr(converted, name, value)
            converted.training = module.training
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, process_group))
        return converted


class _Settings:
    def __init__(self, eps: float, momentum: float | None, group: Any) -> None:
        self.eps, self.momentum, self.group = eps, momentum, group


def _accumulate_dtype(input: Tensor) -> torch.dtype:
    return torch.float64 if input.dtype is torch.float64 else torch.float32


def _as_rows(input: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, C, …) to (N·…, C)."""
    return input.to(dtype).movedim(1, -1).reshape(-1, input.shape[1])


def _joined_statistics(rows: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Mean and mean squared deviation (biased variance) of all ranks' rows, (C,) each, and the number of rows.

    Ranks send their number of rows, means and sums of squared deviations, which are then combined in rank order [1]: no
    difference of large squares, and the same bits on all ranks.

    [1] T. F. Chan, G. H. Golub, R. J. LeVeque, Updating formulae and a pairwise algorithm for computing sample
        variances, 1979.
    """
    channels = rows.shape[1]
    mine = rows.new_zeros(2 * channels + 1, dtype=torch.float64)
    if len(rows):
        mean = rows.mean(dim=0)
        mine[:channels] = mean
        mine[channels:-1] = (rows - mean).square().sum(dim=0)
        mine[-1] = len(rows)
    everyone = mine.new_empty(dist.get_world_size(group), len(mine))
    collectives.all_gather_into_tensor(everyone.view(-1), mine, group)
    total, mean, squares = 0.0, mine.new_zeros(channels), mine.new_zeros(channels)
    # On a GPU this is where the host waits.
    for row, number in zip(everyone, everyone[:, -1].tolist(), strict=True):
        if number == 0:
            continue
        total += number
        delta = row[:channels] - mean
        mean = mean + delta * (number / total)
        squares = squares + row[channels:-1] + delta.square() * (number * (total - number) / total)
    variance = squares / total if total else mine.new_ones(channels)
    return mean, variance, int(total)


class _SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        num_batches: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        rows = _as_rows(input, _accumulate_dtype(input))
        mean, variance, total = _joined_statistics(rows, settings.group)
        if total:
            _update_running(running_mean, running_var, num_batches, settings, mean, variance, total)
        inverse = torch.rsqrt(variance + settings.eps).to(rows.dtype)
        mean = mean.to(rows.dtype)
        shape = (1, -1, *[1] * (input.dim() - 2))
        output = (input.to(rows.dtype) - mean.view(shape)) * inverse.view(shape)
        if weight is not None:
            output = output * weight.to(rows.dtype).view(shape)
        if bias is not None:
            output = output + bias.to(rows.dtype).view(shape)
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.total, ctx.group = total, settings.group
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output.to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        rows = _as_rows(input, mean.dtype)
        grads = _as_rows(grad, mean.dtype)
        normalised = (rows - mean) * inverse
        sums = torch.stack((grads.sum(dim=0), (grads * normalised).sum(dim=0))).double()
        of_bias, of_weight = sums[0].clone(), sums[1].clone()
        # Every rank takes part, whatever it needs for itself.
        collectives.all_reduce(sums, "sum", ctx.group)
        grad_input = None
        if ctx.needs_input_grad[0]:
            means = (sums / max(ctx.total, 1)).to(mean.dtype)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            flat = (grads - means[0] - normalised * means[1]) * scale
            moved = grad.movedim(1, -1).shape
            grad_input = flat.reshape(moved).movedim(-1, 1).to(input.dtype)
        grad_weight = None if weight is None else of_weight.to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _update_running(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches: Tensor | None,
    settings: _Settings,
    mean: Tensor,
    variance: Tensor,
    total: int,
) -> None:
    """As batch normalisation does: with the unbiased variance, and behind autograd's back."""
    if running_mean is None or running_var is None:
        return
    factor = settings.momentum
    if num_batches is not None:
        num_batches.data.add_(1)
        if factor is None:
            factor = 1.0 / float(num_batches)
    factor = 0.0 if factor is None else factor
    unbiased = variance * (total / max(total - 1, 1))
    for running, value in ((running_mean, mean), (running_var, unbiased)):
        running.data.copy_(running.double() * (1 - factor) + value * factor)
