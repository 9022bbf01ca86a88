"""Training loops as public programs have them, small: the same bits as with torch, or a sentence that says what to do.

A loop builds its models, and its optimizers by `make`, which are HyTrain's or torch's; it knows no difference, except
for options of HyTrain that porting a loop adds (`ours`). It returns what it has seen, and its modules. Each runs with
two algorithms, and with the state on the CPU or on the device. The CPU's updates arrive only while somebody waits.
"""

from __future__ import annotations

import copy
import io
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
from helpers import differing, late_weights, opened, same, weights
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.func import functional_call
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import hytrain
from hytrain.optim import Optimizer

WIDTH, BATCH, STEPS, LR = 32, 8, 4, 1e-2

Module = nn.Module | Sequence[nn.Module]
Found = tuple[object, Sequence[nn.Module]]
Loop = Callable[[Any], Found]


LOOPS: dict[str, Loop] = {}


def loop(run: Any) -> Loop:
    LOOPS[run.__name__] = run
    return run  # type: ignore[no-any-return]


# ---------------------------------------------------------------- models and data


def mlp(*widths: int, seed: int = 0, last: type[nn.Module] | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths[:-1])]
    made = nn.Sequential(*layers, nn.Linear(*widths[-2:]))
    return nn.Sequential(made, last()) if last is not None else made


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(shape or (BATCH, WIDTH), generator=torch.Generator().manual_seed(number))


def classes(number: int, of: int = 16) -> Tensor:
    return torch.randint(of, (BATCH,), generator=torch.Generator().manual_seed(number))


def update(opt: Any, loss: Tensor) -> float:
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def real_and_false(critic: nn.Module, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
    yes, no = critic(real), critic(fake)
    one, zero = torch.ones_like(yes), torch.zeros_like(no)
    with_logits = functional.binary_cross_entropy_with_logits
    return with_logits(yes, one), with_logits(no, zero)


def only_sums(opt: Any) -> AbstractContextManager[Any]:
    """Around a backward whose gradients the loop drops, reads or changes."""
    return opt.no_sync() if isinstance(opt, Optimizer) else nullcontext()  # type: ignore[no-any-return]


def frozen(module: nn.Module, is_frozen: bool) -> None:
    module.requires_grad_(not is_frozen)


# ---------------------------------------------------------------- GANs


def pair() -> tuple[nn.Module, nn.Module]:
    return mlp(16, WIDTH, WIDTH), mlp(WIDTH, WIDTH, 16, seed=1)


def critic_learns(generator: nn.Module, critic: nn.Module, opt: Any, step: int, seen: list[float]) -> Tensor:
    """From the real and then from the false, which are returned."""
    opt.zero_grad()
    fake = generator(noise(step, BATCH, 16))
    for loss in real_and_false(critic, noise(100 + step), fake.detach()):
        loss.backward()
        seen.append(loss.item())
    opt.step()
    return cast(Tensor, fake)


@loop
def dcgan(make: Any) -> Found:
    """The critic's losses one after the other, then the generator's through the critic."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic, ours={"grad_accumulation": 2}), list[float]()
    for step in range(STEPS):
        fake = critic_learns(generator, critic, of_d, step, seen)
        of_d.zero_grad()
        loss = real_and_false(critic, fake, fake)[0]
        loss.backward()
        of_g.step()
        of_g.zero_grad()
        seen.append(loss.item())
    return seen, [generator, critic]


@loop
def dcgan_as_published(make: Any) -> Found:
    """The generator's backward leaves gradients in the critic, which the next step drops."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic), list[float]()
    for step in range(STEPS):
        fake = critic_learns(generator, critic, of_d, step, seen)
        of_g.zero_grad()
        loss = real_and_false(critic, fake, fake)[0]
        loss.backward()
        seen.append(loss.item())
        of_g.step()
    return seen, [generator, critic]


@loop
def gan_with_one_loss_each(make: Any) -> Found:
    """The critic's own step does nothing between backward and `step()`."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic), []
    for step in range(STEPS):
        fake = generator(noise(step, BATCH, 16))
        seen.append(update(of_d, sum(real_and_false(critic, noise(100 + step), fake.detach()))))  # type: ignore[arg-type]
        of_d.zero_grad()
        seen.append(update(of_g, real_and_false(critic, fake, fake)[0]))
    return seen, [generator, critic]


@loop
def gan_generator_first(make: Any) -> Found:
    """The generator's loss before the critic's, which drops what it got."""
    generator, critic = pair()
    of_g, of_d = make(generator), make(critic)
    seen = []
    for step in range(STEPS):
        fake = generator(noise(step, BATCH, 16))
        with only_sums(of_d):
            loss = real_and_false(critic, fake, fake)[0]
            loss.backward()
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
        both = torch.stack(real_and_false(critic, noise(100 + step), fake.detach())).mean()
        both.backward()
        of_d.step()
        of_d.zero_grad()
        seen += [loss.item(), both.item()]
    return seen, [generator, critic]


@loop
def gan_with_a_retained_graph(make: Any) -> Found:
    """The critic's backward goes on into the generator, and leaves the graph for it."""
    generator, critic = pair()
    of_g, of_d = make(generator), make(critic)
    seen = []
    for step in range(STEPS):
        fake = generator(noise(step, BATCH, 16))
        loss = torch.stack(real_and_false(critic, noise(100 + step), fake)).sum()
        loss.backward(retain_graph=True)
        of_d.step()
        of_d.zero_grad()
        of_g.zero_grad()
        frozen(critic, True)
        against = real_and_false(critic, fake, fake)[0]
        against.backward()
        of_g.step()
        of_g.zero_grad()
        frozen(critic, False)
        seen += [loss.item(), against.item()]
    return seen, [generator, critic]


@loop
def wgan_gp(make: Any) -> Found:
    """A critic that is trained more often, with a penalty on the gradients of its input."""
    generator, critic = pair()
    of_g, of_d = make(generator), make(critic)
    seen = []
    for step in range(STEPS):
        real, fake = noise(100 + step), generator(noise(step, BATCH, 16)).detach()
        share = torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(step))
        between = (share * real + (1 - share) * fake).requires_grad_()
        of_d.zero_grad()
        [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        of_d.step()
        seen.append(loss.item())
        if step % 2:
            frozen(critic, True)
            seen.append(update(of_g, -critic(generator(noise(step, BATCH, 16))).mean()))
            frozen(critic, False)
    return seen, [generator, critic]


@loop
def cycle_gan(make: Any) -> Found:
    """One optimizer for two generators, whose critics are frozen meanwhile, as `set_requires_grad` does it."""
    there, back = mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH, seed=1)
    critics = [mlp(WIDTH, WIDTH, 16, seed=2), mlp(WIDTH, WIDTH, 16, seed=3)]
    of_g, of_d = make([there, back]), make(critics)
    seen = []
    for step in range(STEPS):
        a, b = noise(step), noise(100 + step)
        for critic in critics:
            frozen(critic, True)
        of_g.zero_grad()
        made_b, made_a = there(a), back(b)
        loss = functional.l1_loss(back(made_b), a) + functional.l1_loss(there(made_a), b)
        loss = loss + (critics[0](made_b) - 1).square().mean() + (critics[1](made_a) - 1).square().mean()
        loss.backward()
        of_g.step()
        for critic in critics:
            frozen(critic, False)
        of_d.zero_grad()
        of_both = sum(
            (critic(real) - 1).square().mean() + critic(made.detach()).square().mean()
            for critic, real, made in zip(critics, (b, a), (made_b, made_a), strict=True)
        )
        of_both.backward()
        of_d.step()
        seen += [loss.item(), of_both.item()]
    return seen, [there, back, *critics]


# ---------------------------------------------------------------- autoencoders, language, images


@loop
def vae(make: Any) -> Found:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.mean, self.spread = mlp(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
            self.decode = mlp(16, WIDTH, WIDTH, seed=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = self.encode(x).relu()
            mean, spread = self.mean(h), self.spread(h)
            return self.decode(mean + noise(7, BATCH, 16) * (0.5 * spread).exp()), mean, spread

    model = Vae()
    opt, seen = make(model), []
    for step in range(STEPS):
        x = noise(step).sigmoid()
        y, mean, spread = model(x)
        apart = -0.5 * torch.sum(1 + spread - mean.square() - spread.exp())
        seen.append(update(opt, functional.binary_cross_entropy_with_logits(y, x, reduction="sum") + apart))
        model.eval()
        with torch.no_grad():
            seen.append(model.decode(noise(50, BATCH, 16)).sigmoid())
        model.train()
    return seen, [model]


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.body = nn.Embedding(64, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        x, state = self.body(self.table(tokens), state)
        return self.head(x), state


def text(number: int, length: int = 9) -> Tensor:
    return torch.randint(64, (length, BATCH), generator=torch.Generator().manual_seed(number))


@loop
def word_language_model(make: Any) -> Found:
    """The hidden state is carried on and detached; gradients are clipped; the rate falls when validation does not."""
    model = Language()
    opt, state, seen, best, rate = make(model, ours={"max_grad_norm": 0.25}), None, [], float("inf"), LR
    for step in range(2 * STEPS):
        model.train()
        torch.manual_seed(step)
        state = None if state is None else tuple(part.detach() for part in state)
        words = text(step)
        opt.zero_grad()
        logits, state = model(words[:-1], state)
        loss = functional.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
        loss.backward()
        make.clip(model.parameters(), 0.25)
        opt.step()
        seen.append(loss.item())
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                value = functional.cross_entropy(model(text(99))[0].flatten(0, 1), text(99).flatten()).item()
            seen.append(value)
            rate = rate if value < best else rate / 4
            best = min(best, value)
            for group in opt.param_groups:
                group["lr"] = rate
    return seen, [model]


def characters(make: Any, retains: Callable[[int], bool], change: Callable[[nn.Module], list[float]]) -> Found:
    """A backward for each of three characters, then one step."""
    torch.manual_seed(0)
    cell, head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleList([cell, head])
    opt, seen = make(model), []
    for step in range(STEPS):
        opt.zero_grad()
        state, x = torch.zeros(BATCH, WIDTH), noise(step)
        for place in range(3):
            state = cell(x.roll(place, 1), state)
            loss = functional.mse_loss(head(state), x)
            loss.backward(retain_graph=retains(place))
            seen.append(loss.item())
        seen += change(model)
        opt.step()
    return seen, [model]


@loop
def characters_with_a_retained_graph(make: Any) -> Found:
    """All but the last leave the graph."""
    return characters(make, lambda place: place < 2, lambda model: [])


@loop
def translation_with_two_optimizers(make: Any) -> Found:
    """An encoder and a decoder with an optimizer each, and forcing by a teacher in every second step."""
    torch.manual_seed(0)
    encoder, decoder = nn.GRU(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
    table, head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
    of_encoder, of_decoder = make(nn.ModuleList([table, encoder])), make(nn.ModuleList([decoder, head]))
    seen = []
    for step in range(STEPS):
        of_encoder.zero_grad()
        of_decoder.zero_grad()
        source, target = text(step), text(100 + step, 4)
        state, word, loss = encoder(table(source))[1][0], target[0], torch.zeros(())
        for wanted in target[1:]:
            state = decoder(table(word), state)
            logits = head(state)
            loss = loss + functional.cross_entropy(logits, wanted)
            word = wanted if step % 2 else logits.argmax(1)
        loss.backward()
        of_encoder.step()
        of_decoder.step()
        seen.append(loss.item())
    return seen, [encoder, decoder, table, head]


@loop
def nano_gpt(make: Any) -> Found:
    """The rate is set before forward; micro-batches; clipping; checkpoints of the best; evaluation in between."""
    model = Language()
    body = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": body, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    opt = make(model, groups, ours={"max_grad_norm": 1.0, "grad_accumulation": 2})
    seen, best = [], dict[str, Any]()
    for step in range(STEPS):
        for group in opt.param_groups:
            group["lr"] = LR * (step + 1) / STEPS
        if step % 2 == 0:
            model.eval()
            with torch.no_grad():
                seen.append(model(text(99))[0].logsumexp(-1).mean().item())
            model.train()
            best = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(opt.state_dict())}
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            words = text(10 * step + micro)
            loss = functional.cross_entropy(model(words[:-1])[0].flatten(0, 1), words[1:].flatten()) / 2
            loss.backward()
            seen.append(loss.item())
        make.clip(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    model.load_state_dict(best["model"])
    opt.load_state_dict(best["optimizer"])
    words = text(1000)
    seen.append(update(opt, functional.cross_entropy(model(words)[0].flatten(0, 1), words.flatten())))
    return seen, [model]


@loop
def diffusion_with_an_average(make: Any) -> Found:
    """Noise is predicted; an average over `state_dict()` is evaluated; gradients are checkpointed."""
    model = mlp(2 * WIDTH, WIDTH, WIDTH, WIDTH)
    average, opt, seen = copy.deepcopy(model), make(model), []
    for step in range(STEPS):
        x, e, when = noise(step), noise(200 + step), torch.full((BATCH, WIDTH), step / STEPS)
        y = torch.cat([x * (1 - when) + e * when, when], 1)
        for part in model:
            y = checkpoint(part, y, use_reentrant=False)
        seen.append(update(opt, functional.mse_loss(y, e)))
        with torch.no_grad():
            for mean, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(mean * 0.9 + now * 0.1)
            seen.append(average(torch.cat([e, when], 1)))
    return seen, [model, average]


@loop
def classifier_with_warm_up_and_averages(make: Any) -> Found:
    """Layer-wise rates, warm-up and a cosine, mixup, smoothed labels, an EMA by `AveragedModel`, SWA at the end."""
    model = mlp(WIDTH, WIDTH, WIDTH, 16)
    depth = len(model)
    groups = [{"params": list(part.parameters()), "lr": LR * 0.7 ** (depth - i)} for i, part in enumerate(model)]
    opt, seen = make(model, groups), []
    warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=3)
    schedule = lr_scheduler.SequentialLR(opt, [warm, lr_scheduler.CosineAnnealingLR(opt, 5)], [3])
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    swa, slow = swa_utils.AveragedModel(model), swa_utils.SWALR(opt, swa_lr=LR / 5, anneal_epochs=2)
    for step in range(2 * STEPS):
        share = 0.3
        x = share * noise(step) + (1 - share) * noise(step).flip(0)
        y = classes(step)
        loss = sum(
            part * functional.cross_entropy(model(x), labels, label_smoothing=0.1)
            for part, labels in ((share, y), (1 - share, y.flip(0)))
        )
        seen.append(update(opt, loss))
        ema.update_parameters(model)
        if step > 6:
            swa.update_parameters(model)
            slow.step()
        else:
            schedule.step()
        with torch.no_grad():
            seen.append(ema(noise(99)))
    seen.append(swa(noise(99)).detach())
    return seen, [model, ema.module, swa.module]


@loop
def early_stopping_and_the_best_weights(make: Any) -> Found:
    """`ReduceLROnPlateau`, patience, and the best weights loaded from a file at the end."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    schedule, file = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0), io.BytesIO()
    best, waited = float("inf"), 0
    for step in range(4 * STEPS):
        update(opt, functional.cross_entropy(model(noise(step)), classes(step)))
        model.eval()
        with torch.inference_mode():
            value = functional.cross_entropy(model(noise(99)), classes(99)).item()
        model.train()
        schedule.step(value)
        seen.append((value, opt.param_groups[0]["lr"]))
        waited = 0 if value < best else waited + 1
        if value < best:
            best, file = value, io.BytesIO()
            torch.save(model.state_dict(), file)
        if waited == 3:
            break
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    seen.append(functional.cross_entropy(model(noise(99)), classes(99)).item())
    return seen, [model]


@loop
def resumed_from_torchs_state(make: Any) -> Found:
    """Weights, state and schedule of a run with torch's optimizer, in one file."""
    begun = mlp(WIDTH, WIDTH, 16)
    opt = make.torchs(begun)
    schedule = lr_scheduler.StepLR(opt, 3, 0.5)
    for step in range(STEPS):
        update(opt, functional.cross_entropy(begun(noise(step)), classes(step)))
        schedule.step()
    file = io.BytesIO()
    torch.save({"model": begun.state_dict(), "opt": opt.state_dict(), "schedule": schedule.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file)
    model = mlp(WIDTH, WIDTH, 16, seed=5)
    model.load_state_dict(kept["model"])
    opt = make(model)
    schedule = lr_scheduler.StepLR(opt, 3, 0.5)
    opt.load_state_dict(kept["opt"])
    schedule.load_state_dict(kept["schedule"])
    seen = []
    for step in range(STEPS, 2 * STEPS):
        seen.append(update(opt, functional.cross_entropy(model(noise(step)), classes(step))))
        schedule.step()
    return seen, [model]


@loop
def unfrozen_from_the_head_down(make: Any) -> Found:
    model = mlp(WIDTH, WIDTH, WIDTH, 16)
    for part in list(model)[:-1]:
        frozen(part, True)
    opt, seen = make(model), []
    for step in range(3 * STEPS):
        if step in (STEPS, 2 * STEPS):
            frozen(model[2 - step // STEPS], False)
        seen.append(update(opt, functional.cross_entropy(model(noise(step)), classes(step))))
    return seen, [model]


@loop
def encoder_evaluated_on_the_fast_path(make: Any) -> Found:
    """Sequences with padding, evaluated in the mode in which torch leaves the padding out."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    padded = torch.arange(5) >= torch.tensor([5, 4, 3, 2, 5, 1, 5, 2])[:, None]
    opt, seen = make(model), []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = noise(step, BATCH, 5, WIDTH)
        seen.append(update(opt, functional.mse_loss(model(x, src_key_padding_mask=padded), x.sin())))
        model.eval()
        with torch.no_grad():
            seen.append(model(noise(99, BATCH, 5, WIDTH), src_key_padding_mask=padded).mean(1).clone())
        model.train()
    return seen, [model]


# ---------------------------------------------------------------- learning by example, by teachers, by pairs


@loop
def moco(make: Any) -> Found:
    """A momentum encoder, and a queue of its outputs."""
    query = mlp(WIDTH, WIDTH, 16)
    key, queue = copy.deepcopy(query).requires_grad_(False), functional.normalize(noise(5, 16, 32), dim=0)
    opt, seen = make(query), []
    for step in range(STEPS):
        q = functional.normalize(query(noise(step)), dim=1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            k = functional.normalize(key(noise(step) + 0.1), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.07
        seen.append(update(opt, functional.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))))
        queue = torch.cat([k.T, queue[:, :-BATCH]], 1)
    return seen, [query, key]


@loop
def byol(make: Any) -> Found:
    """A predictor on top, a target that follows, two views."""
    online, predictor = mlp(WIDTH, WIDTH, 16), mlp(16, WIDTH, 16, seed=1)
    target = copy.deepcopy(online)
    frozen(target, True)
    opt, seen = make([online, predictor]), []
    for step in range(STEPS):
        one, two = noise(step), noise(step) + 0.1 * noise(100 + step)
        loss = torch.zeros(())
        for a, b in ((one, two), (two, one)):
            with torch.no_grad():
                wanted = target(b)
            loss = loss + (2 - 2 * functional.cosine_similarity(predictor(online(a)), wanted)).mean()
        seen.append(update(opt, loss))
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 0.05)
    return seen, [online, predictor, target]


@loop
def triplets(make: Any) -> Found:
    """One network for anchor, positive and negative, and weights that are shared by three forwards."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        parts = [functional.normalize(model(noise(10 * step + i)), dim=1) for i in range(3)]
        seen.append(update(opt, functional.triplet_margin_loss(*parts)))
    return seen, [model]


@loop
def distilled(make: Any) -> Found:
    """A teacher in training at the same time, then a student that learns from it and from labels."""
    teacher, student = mlp(WIDTH, WIDTH, 16), mlp(WIDTH, 16, 16, seed=1)
    of_teacher, of_student, seen = make(teacher), make(student), []
    for step in range(STEPS):
        x, y = noise(step), classes(step)
        seen.append(update(of_teacher, functional.cross_entropy(teacher(x), y)))
        with torch.no_grad():
            soft = (teacher(x) / 4).softmax(1)
        logits = student(x)
        learned = functional.kl_div((logits / 4).log_softmax(1), soft, reduction="batchmean") * 16
        seen.append(update(of_student, 0.5 * learned + 0.5 * functional.cross_entropy(logits, y)))
    return seen, [teacher, student]


@loop
def maml(make: Any) -> Found:
    """Second order: two inner steps for each task, and one outer backward through all of them."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        outer = torch.zeros(())
        for task in range(2):
            fast = dict(model.named_parameters())
            for inner in range(2):
                number = 100 * step + 10 * task + inner
                loss = functional.cross_entropy(functional_call(model, fast, noise(number)), classes(number))
                slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
            outer = outer + functional.cross_entropy(functional_call(model, fast, noise(step)), classes(step))
        seen.append(update(opt, outer / 2))
    return seen, [model]


@loop
def maml_of_first_order(make: Any) -> Found:
    """A copy learns each task with an optimizer of torch's; the sum of its gradients is given to the model."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        opt.zero_grad()
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for task in range(2):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), lr=0.1)
            for turn in range(3):
                number = 100 * step + 10 * task + turn
                loss = functional.cross_entropy(learner(noise(number)), classes(number))
                inner.zero_grad()
                loss.backward()
                if turn < 2:
                    inner.step()
            seen.append(loss.item())
            for total, p in zip(sums, learner.parameters(), strict=True):
                total += p.grad
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total / 2
        opt.step()
    return seen, [model]


@loop
def reptile(make: Any) -> Found:
    """Weights are moved towards those that a task has found, and the optimizer goes on from there."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for turn in range(3):
            number = 10 * step + turn
            seen.append(update(opt, functional.cross_entropy(model(noise(number)), classes(number))))
        after = model.state_dict()
        model.load_state_dict({name: before[name] + (after[name] - before[name]) * 0.3 for name in before})
    return seen, [model]


@loop
def lookahead_around_it(make: Any) -> Found:
    """Slow weights in a wrapper, which writes them back through `p.data`."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    slow = [[p.data.clone() for p in group["params"]] for group in opt.param_groups]
    for step in range(2 * STEPS):
        seen.append(update(opt, functional.cross_entropy(model(noise(step)), classes(step))))
        if step % 3 == 2:
            for group, kept in zip(opt.param_groups, slow, strict=True):
                for p, q in zip(group["params"], kept, strict=True):
                    q.add_(p.data - q, alpha=0.5)
                    p.data.copy_(q)
    return seen, [model]


@loop
def sam_as_published(make: Any) -> Found:
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        functional.cross_entropy(model(noise(step)), classes(step)).backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters() if p.grad is not None]), p=2)
        kept = [p.data.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad * (0.05 / (norm + 1e-12)))  # type: ignore[operator]
        opt.zero_grad()
        loss = functional.cross_entropy(model(noise(step)), classes(step))
        loss.backward()
        for p, before in zip(model.parameters(), kept, strict=True):
            p.data = before
        opt.step()
        opt.zero_grad()
        seen.append((norm.item(), loss.item()))
    return seen, [model]


@loop
def elastic_weights(make: Any) -> Found:
    """Two tasks; the second is held to the first one's weights, by how much these mattered."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        seen.append(update(opt, functional.cross_entropy(model(noise(step)), classes(step))))
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(kept)
    loss = functional.cross_entropy(model(noise(50)), classes(50))
    matters = dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))
    for step in range(STEPS):
        pull = sum((matters[name].square() * (p - kept[name]).square()).sum() for name, p in model.named_parameters())
        loss = functional.cross_entropy(model(noise(100 + step)), classes(100 + step))
        seen.append(update(opt, loss + 100 * pull))
    return seen, [model]


@loop
def grown_by_a_block(make: Any) -> Found:
    """A block and its parameter group are added during training."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(2 * STEPS):
        if step == STEPS:
            torch.manual_seed(9)
            block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            model.insert(1, block)
            opt.add_param_group({"params": list(block.parameters()), "lr": LR / 2})
        seen.append(update(opt, functional.cross_entropy(model(noise(step)), classes(step))))
    return seen, [model]


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
    base.forward = lambda x: base["second"](base["first"](x).tanh())  # type: ignore[method-assign]
    model = get_peft_model(base, LoraConfig(r=16, target_modules=["first", "second"], lora_dropout=0.0))  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.copy_(noise(p.numel(), *p.shape) * 0.01)
    return model


@loop
def lora_plus(make: Any) -> Found:
    """B learns faster than A, as groups; the adapters are merged for an evaluation."""
    model = adapted()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if "lora_A" in name], "lr": LR},
        {"params": [p for name, p in named if "lora_B" in name], "lr": 16 * LR, "weight_decay": 0.0},
    ]
    opt, seen = make(model, groups), []
    for step in range(STEPS):
        seen.append(update(opt, functional.mse_loss(model(noise(step)), noise(step).sin())))
        model.merge_adapter()
        with torch.no_grad():
            seen.append(model(noise(99)))
        model.unmerge_adapter()
    return seen, [model]


# ---------------------------------------------------------------- reinforcement


def shared() -> tuple[nn.Module, nn.Module, nn.Module]:
    return mlp(WIDTH, WIDTH, WIDTH), mlp(WIDTH, 16, 16, seed=1), mlp(WIDTH, 16, 16, seed=2)


@loop
def ppo(make: Any) -> Found:
    """A rollout, then several epochs over it in mini-batches, clipped, until the policies differ too much."""
    body, actor, critic = shared()
    opt, seen = make([body, actor, critic], ours={"max_grad_norm": 0.5}), []
    parameters = [p for part in (body, actor, critic) for p in part.parameters()]
    for rollout in range(3):
        with torch.no_grad():
            states = noise(rollout, 16, WIDTH)
            policy = Categorical(logits=actor(body(states)))
            actions = policy.probs.argmax(1)
            before, values = policy.log_prob(actions), critic(body(states)).mean(1)
            returns = values + noise(100 + rollout, 16)
        for epoch in range(2):
            for part in torch.arange(16).roll(epoch).split(8):
                hidden = body(states[part])
                policy, value = Categorical(logits=actor(hidden)), critic(hidden).mean(1)
                ratio = (policy.log_prob(actions[part]) - before[part]).exp()
                gain = returns[part] - values[part]
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = loss + 0.5 * (value - returns[part]).square().mean() - 0.01 * policy.entropy().mean()
                opt.zero_grad()
                loss.backward()
                make.clip(parameters, 0.5)
                opt.step()
                seen.append(loss.item())
            with torch.no_grad():
                now = Categorical(logits=actor(body(states))).log_prob(actions)
                if (before - now).mean() > 0.5:
                    break
    return seen, [body, actor, critic]


@loop
def reinforce_over_an_episode(make: Any) -> Found:
    """Losses of all steps of an episode, which are computed with the same weights, and one backward."""
    body, actor, _ = shared()
    opt, seen = make([body, actor]), []
    for episode in range(STEPS):
        state, logs, rewards = noise(episode, 1, WIDTH), [], []
        for _ in range(4):
            policy = Categorical(logits=actor(body(state)))
            action = policy.probs.argmax(1)
            logs.append(policy.log_prob(action))
            rewards.append(float(state.mean()) - float(action))
            state = state.roll(int(action) + 1, 1)
        total, losses = 0.0, []
        for log, reward in zip(reversed(logs), reversed(rewards), strict=True):
            total = reward + 0.9 * total
            losses.append(-log * total)
        seen.append(update(opt, torch.cat(losses).sum()))
    return seen, [body, actor]


@loop
def actor_critic_with_two_losses(make: Any) -> Found:
    """Two optimizers, one for the body and the actor; the critic's loss is on a detached state."""
    body, actor, critic = shared()
    of_actor, of_critic, seen = make([body, actor]), make(critic), []
    for step in range(STEPS):
        hidden = body(noise(step))
        value, policy = critic(hidden.detach()).mean(1), Categorical(logits=actor(hidden))
        gain = noise(100 + step, BATCH) - value
        losses = -(policy.log_prob(classes(step)) * gain.detach()).mean(), gain.square().mean()
        of_actor.zero_grad()
        of_critic.zero_grad()
        for loss in losses:
            loss.backward()
        of_actor.step()
        of_critic.step()
        seen += [loss.item() for loss in losses]
    return seen, [body, actor, critic]


@loop
def soft_actor_critic(make: Any) -> Found:
    """The critics are frozen while the actor learns through them; their targets follow softly."""
    actor = mlp(WIDTH, WIDTH, 16)
    critics = nn.ModuleList([mlp(WIDTH + 16, WIDTH, 16, seed=1), mlp(WIDTH + 16, WIDTH, 16, seed=2)])
    targets, of_actor, of_critics = copy.deepcopy(critics).requires_grad_(False), make(actor), make(critics)
    seen = []
    for step in range(STEPS):
        state, after = noise(step), noise(100 + step)
        with torch.no_grad():
            pairs = torch.cat([after, actor(after).tanh()], 1)
            wanted = noise(200 + step, BATCH, 16) + 0.9 * torch.min(targets[0](pairs), targets[1](pairs))
        pairs = torch.cat([state, noise(300 + step, BATCH, 16).tanh()], 1)
        loss = sum(functional.mse_loss(critic(pairs), wanted) for critic in critics)
        seen.append(update(of_critics, loss))  # type: ignore[arg-type]
        frozen(critics, True)
        pairs = torch.cat([state, actor(state).tanh()], 1)
        seen.append(update(of_actor, -torch.min(critics[0](pairs), critics[1](pairs)).mean()))
        frozen(critics, False)
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                slow.data.mul_(0.95)
                slow.data.add_(0.05 * fast.data)
    return seen, [actor, critics, targets]


@loop
def ddpg(make: Any) -> Found:
    """What the actor's loss leaves in the critic is dropped."""
    actor, critic = mlp(WIDTH, WIDTH, 16), mlp(16, WIDTH, 16, seed=1)
    targets = copy.deepcopy(critic).requires_grad_(False)
    of_actor, of_critic, seen = make(actor), make(critic), []
    for step in range(STEPS):
        with torch.no_grad():
            wanted = noise(step, BATCH, 16) + 0.9 * targets(actor(noise(100 + step)))
        seen.append(update(of_critic, functional.smooth_l1_loss(critic(noise(200 + step, BATCH, 16)), wanted)))
        of_critic.zero_grad()
        with only_sums(of_critic):
            seen.append(update(of_actor, -critic(actor(noise(step))).mean()))
        of_critic.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critic.parameters(), strict=True):
                slow.copy_(0.95 * slow + 0.05 * fast)
    return seen, [actor, critic, targets]


# ---------------------------------------------------------------- torch's order, by one line: backward only sums


@loop
def gan_retained_and_clipped(make: Any) -> Found:
    """The critic's graph is kept for the generator's; the clipping is the loop's own. Nothing is ported."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic), []
    for step in range(STEPS):
        fake = generator(noise(step, BATCH, 16))
        of_d.zero_grad()
        torch.stack(real_and_false(critic, noise(100 + step), fake)).sum().backward(retain_graph=True)
        seen.append(float(nn.utils.clip_grad_norm_(critic.parameters(), 0.05)))
        of_d.step()
        of_d.zero_grad()
        of_g.zero_grad()
        frozen(critic, True)
        real_and_false(critic, fake, fake)[0].backward()
        of_g.step()
        of_g.zero_grad()
        frozen(critic, False)
    return seen, [generator, critic]


@loop
def dcgan_in_torchs_order(make: Any) -> Found:
    """`zero_grad()` comes first, so the generator's backward adds to the gradients of the critic's last step."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic), []
    for step in range(STEPS):
        critic.zero_grad()
        fake = generator(noise(step, BATCH, 16))
        for loss in real_and_false(critic, noise(100 + step), fake.detach()):
            with only_sums(of_d):
                loss.backward()
            seen.append(loss.item())
        of_d.step()
        generator.zero_grad()
        loss = real_and_false(critic, fake, fake)[0]
        with only_sums(of_d):
            loss.backward()
        of_g.step()
        seen.append(loss.item())
    return seen, [generator, critic]


@loop
def gan_with_the_generator_first(make: Any) -> Found:
    """What the generator's backward leaves in the critic is dropped before the critic's own."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic), []
    for step in range(STEPS):
        of_g.zero_grad()
        fake = generator(noise(step, BATCH, 16))
        loss = real_and_false(critic, fake, fake)[0]
        with only_sums(of_d):
            loss.backward()
        of_g.step()
        of_d.zero_grad()
        both = torch.stack(real_and_false(critic, noise(100 + step), fake.detach())).mean()
        with only_sums(of_d):
            both.backward()
        of_d.step()
        seen += [loss.item(), both.item()]
    return seen, [generator, critic]


@loop
def wgan_clipping_weights(make: Any) -> Found:
    """The critic's weights are clamped after its step, and its gradients by value before."""
    generator, critic = pair()
    of_g, of_d, seen = make(generator), make(critic), []
    for step in range(STEPS):
        of_d.zero_grad()
        fake = generator(noise(step, BATCH, 16)).detach()
        with only_sums(of_d):
            (critic(fake).mean() - critic(noise(100 + step)).mean()).backward()
        nn.utils.clip_grad_value_(critic.parameters(), 1e-2)
        of_d.step()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.05, 0.05)
        of_g.zero_grad()
        frozen(critic, True)
        loss = -critic(generator(noise(step, BATCH, 16))).mean()
        loss.backward()
        frozen(critic, False)
        of_g.step()
        seen.append(loss.item())
    return seen, [generator, critic]


@loop
def characters_retained_scaled_and_logged(make: Any) -> Found:
    """All leave the graph; gradients are averaged and their norms logged. Nothing is ported."""

    def average(model: nn.Module) -> list[float]:
        found = [parameter.grad for parameter in model.parameters()]
        return [float(gradient.mul_(1 / 3).norm()) for gradient in found if gradient is not None]

    return characters(make, lambda place: True, average)


@loop
def steps_that_are_dropped(make: Any) -> Found:
    """With a retained graph, every third step's gradients are dropped. Nothing is ported."""
    model = mlp(WIDTH, WIDTH, 16)
    opt = make(model)
    for step in range(2 * STEPS):
        functional.cross_entropy(model(noise(step)), classes(step)).backward(retain_graph=True)
        if step % 3 == 1:
            model.zero_grad()
        opt.step()
        opt.zero_grad()
    return None, [model]


def before_step(make: Any, change: Callable[[Any, int], None]) -> Found:
    model = Language()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    opt, seen = make(model, [{"params": matrices}, {"params": rest}]), []
    for step in range(STEPS):
        torch.manual_seed(step)
        words = text(step)
        loss = functional.cross_entropy(model(words[:-1])[0].flatten(0, 1), words[1:].flatten())
        with only_sums(opt):
            loss.backward()
        change(opt, step)
        opt.step()
        model.zero_grad(set_to_none=True)
        seen.append(loss.item())
    return seen, [model]


@loop
def llm_c(make: Any) -> Found:
    """The rate is set right before `step()`, and the norm is the loop's own."""

    def change(opt: Any, step: int) -> None:
        nn.utils.clip_grad_norm_([p for group in opt.param_groups for p in group["params"]], 0.5)
        for group in opt.param_groups:
            group["lr"] = LR * (step + 1) / STEPS

    return before_step(make, change)


@loop
def nanochat(make: Any) -> Found:
    """So are momentum and decay."""

    def change(opt: Any, step: int) -> None:
        for group in opt.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * (1 - step / (2 * STEPS))
            group["weight_decay"] = 0.1 * (1 - step / STEPS)
            if "momentum" in group:
                group["momentum"] = 0.85 + 0.1 * min(step / 3, 1)

    return before_step(make, change)


@loop
def evaluated_in_half_precision(make: Any) -> Found:
    """The model is converted late and comes back, with the gradients of the last step."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        seen.append(update(opt, functional.cross_entropy(model(noise(step)), classes(step))))
        if step > 1:
            model.half()
            with torch.no_grad():
                seen.append(model(noise(99).half()).argmax(1).tolist())
            model.float()
    return seen, [model]


@loop
def ddpg_in_torchs_order(make: Any) -> Found:
    """The actor's loss goes through the critic, whose gradients of it are dropped by its next `zero_grad()`."""
    actor, critic = mlp(WIDTH, WIDTH, 16), mlp(16, WIDTH, 16, seed=1)
    of_actor, of_critic, seen = make(actor), make(critic), []
    for step in range(STEPS):
        value = critic(noise(200 + step, BATCH, 16))
        with only_sums(of_critic):
            seen.append(update(of_critic, functional.smooth_l1_loss(value, noise(step, BATCH, 16))))
            seen.append(update(of_actor, -critic(actor(noise(step))).mean()))
    return seen, [actor, critic]


@loop
def sharpness_aware(make: Any) -> Found:
    """SAM: weights move along the gradient for a second backward, and back."""
    model = mlp(WIDTH, WIDTH, 16)
    opt, seen = make(model), []
    for step in range(STEPS):
        x, y = noise(step), classes(step)
        with only_sums(opt):
            functional.cross_entropy(model(x), y).backward()
        found = [parameter.grad for parameter in model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in found]).norm()
        moves = [0.05 * gradient / (norm + 1e-12) for gradient in found]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        opt.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        with only_sums(opt):
            loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        opt.step()
        opt.zero_grad()
        seen.append(loss.item())
    return seen, [model]


@loop
def ada_lora(make: Any) -> Found:
    """Ranks are pruned after `step()` by what the gradients were."""
    from peft import AdaLoraConfig, get_peft_model

    torch.manual_seed(0)
    base: Any = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
    base.forward = lambda x: base["second"](base["first"](x).tanh())
    config = AdaLoraConfig(target_modules=["first", "second"], init_r=16, target_r=8, total_step=9, tinit=1, tfinal=2)
    model: Any = get_peft_model(base, config)
    opt, seen = make(model), []
    for step in range(6):
        loss = functional.mse_loss(model(noise(step)), noise(step).sin())
        with only_sums(opt):
            loss.backward()
        opt.step()
        model.base_model.update_and_allocate(step)
        opt.zero_grad()
        seen.append(loss.item())
    return seen, [model]


# ---------------------------------------------------------------- how they are run


class Torchs:
    """Makes torch's optimizers."""

    def __init__(self, algorithm: str) -> None:
        adamw = partial(torch.optim.AdamW, lr=LR, fused=True)
        self.torchs_kind: Any = adamw if algorithm == "AdamW" else partial(torch.optim.SGD, lr=LR, momentum=0.9)
        self.clip = nn.utils.clip_grad_norm_

    def torchs(self, model: Module, groups: Any = None) -> Any:
        parts = [model] if isinstance(model, nn.Module) else model
        return self.torchs_kind(groups or [p for part in parts for p in part.parameters()])

    def __call__(self, model: Module, groups: Any = None, ours: dict[str, Any] | None = None) -> Any:
        return self.torchs(model, groups)


class Ours(Torchs):
    """Makes HyTrain's, which are closed at the end. What clips by itself is not clipped by the loop."""

    def __init__(self, algorithm: str, k: float, opened_ones: ExitStack) -> None:
        super().__init__(algorithm)
        self.kind = getattr(hytrain, algorithm)
        numbers = {"lr": LR, "k": k} | ({} if algorithm == "AdamW" else {"momentum": 0.9})
        self.options, self.opened = numbers, opened_ones
        self.clip = lambda parameters, norm: torch.zeros(())

    def __call__(self, model: Module, groups: Any = None, ours: dict[str, Any] | None = None) -> Any:
        return self.opened.enter_context(opened(self.kind, model, groups, **self.options, **(ours or {})))


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    with late_weights() as gate:
        yield gate


def kept(found: Found) -> tuple[object, list[dict[str, Tensor]]]:
    return found[0], [weights(module) for module in found[1]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("algorithm", ["AdamW", "SGD"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop(name: str, algorithm: str, gate: threading.Event) -> None:
    run = LOOPS[name]
    expected, trained = kept(run(Torchs(algorithm)))
    for k in (0.0, 1.0):
        with ExitStack() as opened_ones:
            try:
                found, got = kept(run(Ours(algorithm, k, opened_ones)))
                assert same(found, expected), f"k={k}"
                for one, other in zip(got, trained, strict=True):
                    assert differing(one, other) == [], f"k={k}"
            finally:
                gate.set()
