"""A policy version on its way from the learner to the engines: written once, hashed per tensor, taken up replica by replica.

``snapshot`` writes a version as one file and its manifest, ``reader`` gives the tensors back and refuses what does not match the manifest,
``publisher`` rolls a manifest over the serving replicas, ``copies`` brings a file to another node,
``retire`` deletes files nobody needs, ``adapter`` merges a version of adapters into its base. No engine is imported here, and only
``snapshot``, ``adapter`` and ``reader.read_tensors`` need torch.
"""
