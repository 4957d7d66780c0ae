"""The page for who looks after a week (`tide report`): what the ledger knows of a deployment, as figures and
as HTML. Reads the ledger's database and the cost model's file, nothing else.
"""
