"""The changes that committed commands make to the state, one module for each subject. Each has its
``HANDLERS``, a function a command, which takes the state's data and returns the result. What is
allowed, and what comes of it, is decided by the pure rules of the same names one floor up.
"""
