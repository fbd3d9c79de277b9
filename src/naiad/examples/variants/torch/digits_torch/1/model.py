import torch
from torch import nn


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 96)
        self.scores = nn.Linear(96, 10)

    def forward(self, IMAGE):
        scores = self.scores(torch.relu(self.hidden(IMAGE / 16)))
        return {"PROBABILITIES": scores.softmax(dim=1), "LABEL": scores.argmax(dim=1, keepdim=True)}
