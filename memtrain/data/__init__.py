"""From text to the batches of a step: documents → tokens → rows of one length → the micro-batches of each step.

``text`` reads documents, ``tokenizer`` trains one where the job brings none, ``rows`` cuts them into rows and checks rows
that users bring, ``instructions`` makes rows whose answers alone are trained, ``batches`` decides which
rows each step sees, ``loading`` lets worker processes make them. Nothing here knows the model, the plan or a device.
"""
