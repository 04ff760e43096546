"""Images and labels, and what is done to them before a network sees them. Imports no torch: import the module you need.

``load.load`` reads a named data set (``embedded``, ``cifar``, ``image_folder``) and prepares it;
``images.from_datasets`` takes your own. ``batches.plan_epoch`` makes an epoch's random draws, and
``augmentation.OnDevice`` holds the data on the device that trains and applies them (``augment``). Images that do not
fit into memory are streamed (``stream``) from worker processes (``decoder_pool``, ``decoder``).
"""
