from examples.minimal_pairs.cli import main

main()
