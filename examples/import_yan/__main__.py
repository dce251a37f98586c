from examples.import_yan.cli import main

main()
