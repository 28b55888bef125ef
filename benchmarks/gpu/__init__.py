"""What only a GPU can tell, measured in parts that can be taken up again: ``make gpu``.

Each module measures one thing and returns plain values; ``parts`` lists them in their order, ``verdicts`` holds them
against the goals, ``__main__`` runs them one by one in processes of their own. Timing and contenders are those of
:mod:`stepping`, networks and ways those of ``training``; none of it is here a second time.
"""
