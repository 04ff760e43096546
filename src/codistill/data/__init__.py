"""Images and labels, and what is done to them before a network sees them. Imports no torch: import the module you need.

``load.load`` reads a named data set, ``datasets.from_datasets`` takes your own, ``batches.plan_epoch`` makes an epoch's
random draws and ``augment.augment`` applies them to a batch on its device. Folders of images go through ``layout``
(what is there), ``folder`` (into memory, or left on the disk as ``photos.Photos``) and ``decoders`` (who decodes).
"""
