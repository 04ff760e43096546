"""Third-party networks: timm's, torchvision's, the user's own modules. Importing the package imports no torch."""
