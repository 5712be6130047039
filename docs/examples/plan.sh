# Does a training fit, and how fast is a step? Reads the model's config.json, no weights, and trains nothing.
#   bash docs/examples/plan.sh
set -e
recipe=docs/examples/recipe.yaml

# The report on stdout; the plan and a picture of the step in the folder.
disco-accel plan $recipe --device cpu --memory 512KiB -o out/plan

# A budget that cannot work: exit code 1, and the smallest budget that does.
if disco-accel plan $recipe --device cpu --memory 128KiB; then exit 1; fi
