"""The drawing functions, as a program sees them: this file stands before it in the sandbox (tasks/drawing/sandbox.py).

A point is (row, column), from 0 at the top left. A color is a digit. Drawing changes the picture in place and returns
nothing. What lies outside of the picture is left out; a whole row or column that is not there is an `IndexError`.
"""


class Img:
    """A picture: rows of colors. Takes `img[row, column]`, slices of both, and `img.shape` as numpy does."""

    def __init__(self, rows):
        self.rows = rows
        self.shape = (len(rows), len(rows[0]))

    def __getitem__(self, place):
        if not isinstance(place, tuple):
            return self.rows[place]
        row, column = place
        if isinstance(row, slice):
            return [line[column] for line in self.rows[row]]
        return self.rows[row][column]

    def __setitem__(self, place, color):
        height, width = self.shape
        row, column = place if isinstance(place, tuple) else (place, slice(None))
        rows = range(height)[row] if isinstance(row, slice) else [row]
        columns = range(width)[column] if isinstance(column, slice) else [column]
        for y in rows:
            for x in columns:
                self.rows[y][x] = color

    def copy(self):
        return Img([list(row) for row in self.rows])


def create_img(shape, color):
    """A new picture of (rows, columns) in one color."""
    return Img([[color] * shape[1] for _ in range(shape[0])])


def draw_pixel(img, point, color):
    height, width = img.shape
    y, x = point
    if 0 <= y < height and 0 <= x < width:
        img.rows[y][x] = color


def draw_horizontal_line(img, row, color):
    """The whole row."""
    height, width = img.shape
    if not 0 <= row < height:
        raise IndexError(f"row {row} of {height}")
    for x in range(width):
        img.rows[row][x] = color


def draw_vertical_line(img, column, color):
    """The whole column."""
    height, width = img.shape
    if not 0 <= column < width:
        raise IndexError(f"column {column} of {width}")
    for y in range(height):
        img.rows[y][column] = color


def draw_line(img, point1, point2, color):
    """From one point to the other, both included (Bresenham)."""
    (y, x), (y2, x2) = point1, point2
    dy, dx = abs(y2 - y), abs(x2 - x)
    step_y, step_x = (1 if y2 > y else -1), (1 if x2 > x else -1)
    error = dx - dy
    height, width = img.shape
    draw_pixel(img, (y, x), color)
    # To the end, or until nothing of the picture lies ahead
    while (y, x) != (y2, x2) and (y < height if step_y > 0 else y >= 0) and (x < width if step_x > 0 else x >= 0):
        doubled = 2 * error
        if doubled > -dy:
            error -= dy
            x += step_x
        if doubled < dx:
            error += dx
            y += step_y
        draw_pixel(img, (y, x), color)


def draw_rectangle(img, point1, point2, color):
    """Filled, both corners included."""
    height, width = img.shape
    top, bottom = sorted([point1[0], point2[0]])
    left, right = sorted([point1[1], point2[1]])
    for y in range(max(top, 0), min(bottom, height - 1) + 1):
        for x in range(max(left, 0), min(right, width - 1) + 1):
            img.rows[y][x] = color


def flood_fill(img, point, color):
    """The pixels that a point is joined to by its color, sideways and upright."""
    height, width = img.shape
    y, x = point
    if not (0 <= y < height and 0 <= x < width):
        return
    old = img.rows[y][x]
    if old == color:
        return
    left = [(y, x)]
    while left:
        y, x = left.pop()
        if 0 <= y < height and 0 <= x < width and img.rows[y][x] == old:
            img.rows[y][x] = color
            left.extend([(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)])
