"""Networks that others wrote: timm's, torchvision's, one's own modules. Importing the package imports no torch."""
