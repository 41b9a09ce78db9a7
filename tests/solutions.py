"""Solutions of the notebooks' exercises, and wrong answers that the checks must not accept.

{notebook: {exercise: {True: a solution, False: a wrong answer}}}. The last exercise of each is open-ended.
"""

SOLUTIONS = {
    "02_data_parallel": {
        1: {True: """
def bytes_sent(num_parameters, dp):
    return 2 * (dp - 1) * 4 * num_parameters // dp
""", False: """
def bytes_sent(num_parameters, dp):
    return 2 * 4 * num_parameters // dp
"""},
        2: {True: """
def deal(sizes, capacity):
    buckets = []
    for place in reversed(range(len(sizes))):
        if not buckets or sum(sizes[i] for i in buckets[-1]) + sizes[place] > capacity:
            buckets.append([])
        buckets[-1].append(place)
    return buckets
""", False: """
def deal(sizes, capacity):
    buckets = []
    for place in reversed(range(len(sizes))):
        if not buckets or sum(sizes[i] for i in buckets[-1]) >= capacity:
            buckets.append([])
        buckets[-1].append(place)
    return buckets
"""},
        3: {True: """
def count(self, bucket, parameter):
    bucket.missing -= 1
    if bucket.missing == 0:
        self.reducing.append(self.axis.start_all_reduce(bucket.buffer))
""", False: """
def count(self, bucket, parameter):
    bucket.missing -= 1
    if bucket.missing % len(bucket.parameters) == 0:
        self.reducing.append(self.axis.start_all_reduce(bucket.buffer))
"""},
        4: {True: """
def culprit():
    return "step02-only-the-first-bucket-is-reduced"
""", False: """
def culprit():
    return "step02-no-all-reduce"
"""},
    },
}
