"""The numbers of rows in the studies, counted by hand."""

# Rows of each table, counted in the paper: pairs × methods, placements, kinds, edges, networks × methods. What is added
# to Tables 1, 2 and 6 is commented out in its source.
ROWS = {
    "demo": 3,
    "table1": (7 + 2) * 3,
    "table2": (3 + 1) * 3,
    "table3": 6,
    "table4": 2 * 3,
    "table5": 6,
    "table6": (4 + 2) * 3,
    "table7": 3 * 3,
    "kd": 4,
    "efficiency": 7,
    "curves": 3,
    "wrn-28-4-twins": 4,
    "wrn-28-4-edges": 6,
    "wrn-16-2-edges": 6,
    "wrn-16-2-efficiency": 7,
    "wrn-16-4-noise": 12,
    "wrn-28-4-mobilenet": 4,
    "budget-30-epochs": 6 + 2,
    "budget-100-epochs": 6,
    "budget-own-images": 6,
    "budget-unequal": 6,
    "budget-few-images": 6,
    "budget-wrong-labels": 6,
    "budget-embedded": 6,
    "share-scale": 10,
    "finetune": 4,
}
