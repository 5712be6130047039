"""Weight offloading after Beaumont, Eyraud-Dubois and Shilova: which layers, when, and how far from the bound."""
