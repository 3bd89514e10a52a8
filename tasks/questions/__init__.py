"""What tasks of questions share: data, rewards, judge, and the task itself. See tasks/riddles.py and tasks/piqa.py."""
