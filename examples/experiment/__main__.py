from examples.experiment.cli import main

main()
