"""From what people have to the batches of a step: files and objects → records → tokens → rows → micro-batches.

Reading: ``files`` finds what is to be read, ``formats``, ``json_rows`` and ``tables`` read it, each row as a ``record`` with the
place that it comes from. Understanding: ``layouts`` tells what columns mean and ``forms`` what a row says, ``chat`` and
``templates`` write conversations, ``encode`` makes ``examples`` of records, which are tokens and what of them is learnt
(``language``, ``labelled``). Keeping: ``store`` holds rows of unequal length, ``packing`` puts
short ones into one, ``masking`` hides tokens that are to be told, ``padding`` fills rows up, and a ``rowset`` (``sets``) is
rows with all that makes batches of them. Giving: ``batches`` decides which rows each step sees, ``loading`` lets worker
processes make them. Text that is cut without regard to rows is in ``text``, ``tokenizer`` and ``rows``.
Nothing here knows the model, the plan or a device.
"""
