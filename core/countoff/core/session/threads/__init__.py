"""The background threads of a process, and what each of them does for the guards that are open.

The whole process has its threads (`process_threads`) and its session with the other ranks (`session`). A guard is one
of their registrations (`registration`). It has a writer, which writes, a watchdog, and a status, which says whether it
still takes part. The roll call, questions, the even pass and the stall are what a guard exchanges with the others.
"""
