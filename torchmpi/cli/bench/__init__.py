"""``torchmpi bench``: :mod:`.command` starts jobs (:mod:`.launch`), in which :mod:`.job` runs a measurement.

:mod:`.collective_bench`, :mod:`.call_bench` and :mod:`.training` are the measurements; they time :mod:`.contestants`
with :mod:`.timing`.
:mod:`.report` formats, saves and plots results; :mod:`.compare` compares two files of results.
"""
