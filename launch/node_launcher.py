"""DeepSpeed's launcher of the ranks of one machine, as a program: `python -m launch.node_launcher …`."""

from data_pipeline.foundation.absent_modules import absent

with absent("mlflow"):  # DeepSpeed's autotuner would import it, which takes a second and 110 MB
    from deepspeed.launcher.launch import main

if __name__ == "__main__":
    main()
