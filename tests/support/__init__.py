"""What tests share: small recipes and runs, made-up results, processes, images, browsers."""
