"""A Lightning script."""

import logging
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning  # noqa: E402


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


lightning.seed_everything(0, verbose=False)
x = torch.randn(512, 16)
y = x[:, :4].sum(1, keepdim=True).sin() + 0.3 * torch.randn(512, 1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
trainer = lightning.Trainer(
    max_epochs=4,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
)
trainer.fit(Lit(), data, data)
print(f"loss {trainer.callback_metrics['val']:.4f}")
