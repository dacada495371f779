"""One file per family of models; `registry` knows them all."""
