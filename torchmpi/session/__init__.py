"""From ``start()`` to ``stop()``: the object that owns all resources, and the handling of failures."""
