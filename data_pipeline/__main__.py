from data_pipeline.cli import main

if __name__ == "__main__":
    main()
