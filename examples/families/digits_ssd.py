"""Find and name handwritten digits on a canvas: a small single-shot detector (SSD).

Data: scikit-learn's 1797 digits. A canvas of 48×48 pixels holds 1 to 4 of them, stretched to 12 to 28 pixels, apart
from each other. 3000 canvases to train on are made of 1200 images, 800 to test on of the other 597, the same for every
seed. Judged by: mAP at IoU 0.5 as in VOC 2010 and later, the area under the interpolated precision–recall curve, the
mean of ten digits. In the paper (Micikevicius et al. 2018): SSD, 76.9 % in FP32; FP16 without a loss scale diverges,
77.1 % at a scale of 8.
Margin: 2.0 points, since two seeds in FP32 differed by 1.3 points (88.82 and 90.16 %).

    python examples/families/digits_ssd.py --seed 1
    mezzo compare --seeds 3 --margin 2.0 examples/families/digits_ssd.py
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

SIDE = 48
ANCHOR_HEIGHTS = {4: (13.0, 17.0), 8: (21.0, 27.0)}  # stride of a feature map: heights of its anchors, in pixels
ANCHORS_PER_CELL = 2
VARIANCE = torch.tensor([0.1, 0.1, 0.2, 0.2])  # as in SSD: offsets of centre and size come out with about unit spread


def make_canvases(images, labels, number, seed):
    """Canvases (number, 1, 48, 48), boxes (number, 4, 4) as x1 y1 x2 y2, classes (number, 4), 0 where there is none."""
    rng = np.random.default_rng(seed)
    canvases = torch.zeros(number, 1, SIDE, SIDE)
    boxes, classes = torch.zeros(number, 4, 4), torch.zeros(number, 4, dtype=torch.long)
    for canvas, box, cls, wanted in zip(canvases, boxes, classes, rng.integers(1, 5, number), strict=True):
        placed = 0
        for chosen in rng.integers(len(labels), size=12):  # places tried
            if placed == wanted:
                break
            height = int(rng.integers(12, 29))
            width = int(height * rng.uniform(0.6, 1.0))
            x, y = (int(corner) for corner in rng.integers(0, (SIDE - width + 1, SIDE - height + 1)))
            region = canvas[:, y : y + height, x : x + width]
            if not region.any():  # no other digit is there
                region += functional.interpolate(images[chosen, None], (height, width), mode="bilinear")[0]
                box[placed] = torch.tensor([x, y, x + width, y + height])
                cls[placed] = labels[chosen] + 1
                placed += 1
    canvases += torch.from_numpy(rng.normal(0.0, 0.1, canvases.shape)).float()
    return canvases, boxes, classes


def make_anchors():
    """All anchors (num_anchors, 4) as centre x, centre y, width, height, in the order of the network's outputs."""
    anchors = [
        torch.tensor([(column + 0.5) * stride, (row + 0.5) * stride, 0.8 * height, height])
        for stride, heights in ANCHOR_HEIGHTS.items()
        for row in range(SIDE // stride)
        for column in range(SIDE // stride)
        for height in heights
    ]
    return torch.stack(anchors)


def corners(centred):
    return torch.cat([centred[..., :2] - centred[..., 2:] / 2, centred[..., :2] + centred[..., 2:] / 2], -1)


def iou(a, b):
    """Intersection over union of boxes (…, n, 4) with boxes (…, m, 4): (…, n, m); an empty box overlaps nothing."""
    a, b = a.unsqueeze(-2), b.unsqueeze(-3)
    inner = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return inner / ((a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - inner).clamp(min=1e-9)


def encode(boxes, anchors):
    """Offsets that `decode` turns back into the boxes."""
    centre, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    offsets = torch.cat([(centre - anchors[..., :2]) / anchors[..., 2:], torch.log(size / anchors[..., 2:])], -1)
    return offsets / VARIANCE.to(offsets.device)


def decode(offsets, anchors):
    offsets = offsets * VARIANCE.to(offsets.device)
    centre = anchors[..., :2] + offsets[..., :2] * anchors[..., 2:]
    return corners(torch.cat([centre, anchors[..., 2:] * torch.exp(offsets[..., 2:])], -1))


def match(boxes, classes, anchors):
    """Class (batch, num_anchors) and box (batch, num_anchors, 4) of each anchor: of its best digit at IoU 0.5 or more.

    The best anchor of each digit is the digit's, whatever their IoU.
    """
    overlap = iou(corners(anchors), boxes)  # (batch, num_anchors, 4)
    best = overlap.argmax(1, keepdim=True)  # (batch, 1, 4)
    overlap.scatter_(1, best, torch.where(classes > 0, 2.0, 0.0).unsqueeze(1))
    quality, digit = overlap.max(2)
    target = torch.where(quality >= 0.5, classes.gather(1, digit), 0)
    return target, boxes.gather(1, digit.unsqueeze(2).expand(-1, -1, 4))


def hard_negatives(losses, positive):
    """The background anchors with the largest losses, three for each positive anchor of the canvas."""
    order = losses.masked_fill(positive, -1.0).argsort(1, descending=True)
    rank = order.argsort(1)
    return (rank < 3 * positive.sum(1, keepdim=True)) & ~positive


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Sequential(*self.block(1, 16, 2), *self.block(16, 32, 2), *self.block(32, 32, 1))  # stride 4
        self.coarse = nn.Sequential(*self.block(32, 64, 2), *self.block(64, 64, 1))  # stride 8
        self.heads = nn.ModuleList(nn.Conv2d(c, ANCHORS_PER_CELL * (11 + 4), 3, padding=1) for c in (32, 64))

    @staticmethod
    def block(channels_in, channels, stride):
        conv = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        return conv, nn.BatchNorm2d(channels), nn.ReLU()

    def forward(self, canvases):
        fine = self.fine(canvases)
        maps = zip(self.heads, (fine, self.coarse(fine)), strict=True)
        out = torch.cat([head(x).permute(0, 2, 3, 1).reshape(len(x), -1, 15) for head, x in maps], 1)
        return out[..., :11], out[..., 11:]  # scores (batch, num_anchors, 11), offsets (batch, num_anchors, 4)


def detection_loss(scores, offsets, boxes, classes, anchors):
    target, box = match(boxes, classes, anchors)
    positive = target > 0
    losses = functional.cross_entropy(scores.transpose(1, 2), target, reduction="none")
    chosen = positive | hard_negatives(losses.detach(), positive)
    wanted = encode(box[positive], anchors.expand_as(box)[positive])
    return (
        losses[chosen].sum() + functional.smooth_l1_loss(offsets[positive], wanted, reduction="sum")
    ) / positive.sum()


def nms(boxes, scores, threshold=0.45):
    """Indices of the boxes that stay, best first: none overlaps a better one by more than the threshold."""
    free, kept = iou(boxes, boxes) <= threshold, []
    order = scores.argsort(descending=True)
    while len(order):
        kept.append(int(order[0]))
        order = order[1:][free[order[0], order[1:]]]
    return kept


def detect(model, canvases, anchors):
    """All detections as rows: canvas, class, score, x1, y1, x2, y2."""
    model.eval()
    rows = []
    with torch.no_grad():
        for start in range(0, len(canvases), 200):
            scores, offsets = model(canvases[start : start + 200])
            probabilities, boxes = scores.float().softmax(2).cpu(), decode(offsets.float(), anchors).cpu()
            for i, (probability, box) in enumerate(zip(probabilities, boxes, strict=True)):
                anchor, cls = (probability[:, 1:] > 0.05).nonzero(as_tuple=True)
                score = probability[anchor, cls + 1]
                surest = score.argsort(descending=True)[:50]  # an untrained network is half sure of everything
                anchor, cls, score = anchor[surest], cls[surest], score[surest]
                apart = box[anchor] + 1000.0 * cls.unsqueeze(1)  # digits of two classes never overlap
                kept = nms(apart, score)
                image = torch.full((len(kept), 1), float(start + i))
                rows.append(torch.cat([image, cls[kept, None] + 1, score[kept, None], box[anchor[kept]]], 1))
    return torch.cat(rows)


def average_precision(right, num_digits):
    """Area under the interpolated precision–recall curve; right: of each detection, the surest first."""
    right = right.double()
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    best_from_here = precision.flip(0).cummax(0).values.flip(0)
    return float((best_from_here * right).sum() / num_digits)  # recall grows by 1/num_digits at each right one


def mean_average_precision(detections, boxes, classes):
    results = []
    for cls in classes[classes > 0].unique().tolist():
        found = detections[detections[:, 1] == cls]
        found = found[found[:, 2].argsort(descending=True, stable=True)]
        free, right = classes == cls, []  # a digit counts once
        for image, box in zip(found[:, 0].long().tolist(), found[:, 3:], strict=True):
            overlap, digit = torch.where(classes[image] == cls, iou(box[None], boxes[image])[0], -1.0).max(0)
            right.append(bool(overlap >= 0.5 and free[image, digit]))
            free[image, digit] &= not right[-1]
        results.append(average_precision(torch.tensor(right, dtype=torch.bool), int((classes == cls).sum())))
    return sum(results) / len(results)


def data():
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1797))
    test, train = order[:597], order[597:]
    return make_canvases(images[train], labels[train], 3000, 1), make_canvases(images[test], labels[test], 800, 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train, (test_canvases, *test_digits) = data()
    train = [tensor.to(device) for tensor in train]
    anchors = make_anchors().to(device)
    torch.manual_seed(options.seed)
    model = Detector().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, options.steps, final_div_factor=1000)
    for step in range(1, options.steps + 1):
        chosen = torch.randint(len(train[0]), (32,)).to(device)
        canvases, boxes, classes = (tensor[chosen] for tensor in train)
        loss = detection_loss(*model(canvases), boxes, classes, anchors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    detections = detect(model, test_canvases.to(device), anchors)
    print(f"test mAP {100 * mean_average_precision(detections, *test_digits):.2f} %")


if __name__ == "__main__":
    main()
