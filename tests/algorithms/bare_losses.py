"""Every policy loss once more, written bare: one expression in torch, clean inputs, local means, no metrics. What the library must equal and may cost.

Shapes: B rows, T tokens; ``mask`` is 0 or 1 of any dtype, ``w`` importance weights. Constants are the defaults of the configuration.
"""

import torch


def token_mean(loss, mask):
    return (loss * mask).sum() / mask.sum()


def row_mean(loss, mask):
    """Mean over rows of token means; all rows have tokens here."""
    return ((loss * mask).sum(1) / mask.sum(1)).mean()


def rho(old, new):
    return (new - old).clamp(-20, 20).exp()


def clipped(adv, ratio, low=0.2, high=0.2):
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))


def vanilla(old, new, adv, mask, w):
    loss = clipped(adv, rho(old, new))
    return token_mean(torch.where(adv < 0, torch.minimum(loss, -adv * 3.0), loss) * w, mask)


def dppo_tv(old, new, adv, mask, w):
    moved = (new.exp() - old.exp()).detach()
    valid = torch.where(adv > 0, moved <= 0.2, moved >= -0.2)
    return token_mean(-adv * rho(old, new).clamp(max=20).detach() * new * valid * w, mask)


def dppo_kl(old, new, adv, mask, w):
    p, q = new.detach().exp(), old.exp()
    kl = q * (old - new.detach()) + (1 - q) * torch.log((1 - q + 1e-8) / (1 - p + 1e-8))
    valid = torch.where(adv > 0, (kl <= 0.2) | (p <= q), (kl <= 0.2) | (p >= q))
    return token_mean(-adv * rho(old, new).clamp(max=20).detach() * new * valid * w, mask)


def gspo(old, new, adv, mask, w):
    mean = ((new - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    s = (mean.detach() + new - new.detach()).clamp(max=10).exp()
    return row_mean(clipped(adv, s) * w, mask)


def sapo(old, new, adv, mask, w):
    tau = torch.where(adv > 0, 1.0, 1.05)
    return row_mean(-adv * torch.sigmoid(tau * (rho(old, new) - 1)) * 4 / tau * w, mask)


def gpg(old, new, adv, mask, w):
    return token_mean(-new * adv * w, mask)


def dro(old, new, adv, mask, w):
    return token_mean(-(new * adv - 0.5 * 0.5 * (new - old).clamp(-20, 20) ** 2) * w, mask)


def cispo(old, new, adv, mask, w):
    return token_mean(-rho(old, new).clamp(0.8, 1.2).detach() * adv * new * w, mask)


def covariance(new, adv, mask):
    mean_new, mean_adv = token_mean(new.detach(), mask), token_mean(adv, mask)
    return (adv - mean_adv) * (new.detach() - mean_new)


def clip_cov(old, new, adv, mask, w):
    ratio, cov = rho(old, new), covariance(new, adv, mask)
    plain, cut = -adv * ratio, -adv * ratio.clamp(0.8, 1.2)
    near = ((cov > 1) & (cov < 5) & ~(cut > plain) & (mask > 0)).nonzero()
    near = near[torch.randperm(len(near))[: max(1, int(0.0002 * mask.sum()))]]
    keep = torch.ones_like(adv)
    keep[near[:, 0], near[:, 1]] = 0
    return token_mean(torch.maximum(plain, cut) * keep * w, mask)


def kl_cov(old, new, adv, mask, w):
    log_ratio, cov = (new - old).clamp(-20, 20), covariance(new, adv, mask).masked_fill(mask == 0, -torch.inf)
    top = torch.zeros(mask.numel())
    top[cov.flatten().topk(max(1, int(0.0002 * mask.sum()))).indices] = 0.1
    return token_mean((-adv * log_ratio.exp() + top.view_as(adv) * log_ratio.abs()) * w, mask)


def geo_mean(old, new, adv, mask, w):
    log_ratio, sign = new - old, adv.sign()
    log_ratio = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.2))
    count = mask.sum(1)
    rows = -(adv * mask).sum(1) / count * ((log_ratio * mask).sum(1) / count).exp()
    return (rows * (((w + 1e-10).log() * mask).sum(1) / count).exp()).mean()


def bypass_mode(old, new, adv, mask, w):
    return vanilla(old, new, adv, mask, torch.ones_like(adv))


BARE = {f.__name__: f for f in (vanilla, dppo_tv, dppo_kl, gspo, sapo, gpg, dro, cispo, clip_cov, kl_cov, geo_mean, bypass_mode)}
