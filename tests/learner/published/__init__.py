"""Settings files of published models, one family each, as their authors published them, and small
models of two layers in their form.

They are facts of the models, kept here because the files that a library writes today have all
fields in one form, and published ones do not.
"""
