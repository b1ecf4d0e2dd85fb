"""Small pages as manuals have them, which rules for web pages take for rubbish."""

# As PostgreSQL's arrays.html: short sentences between listings that repeat themselves, and a table.
ARRAYS = (
    """<html><head><title>Arrays</title></head><body><div class="sect1"><h1>Arrays</h1>
<p>A column of a table can be an array of variable length. This table has two of them:</p>
<pre>CREATE TABLE sal_emp (
    name            text,
    pay_by_quarter  integer[],
    schedule        text[][]
);</pre>
<p>Now its contents are shown by a query, and one number is changed:</p>
"""
    + "".join(
        f"""<pre>UPDATE sal_emp SET pay_by_quarter[{i}] = 15000 WHERE name = 'Bill';
SELECT pay_by_quarter[{i}] FROM sal_emp WHERE name = 'Bill';
 pay_by_quarter
----------------
          {i}5000
(1 row)</pre>
"""
        for i in range(1, 8)
    )
    + """<table><tr><th>Function</th><th>Result</th></tr><tr><td>array_dims</td><td>text</td></tr>
<tr><td>array_upper</td><td>integer</td></tr><tr><td>array_lower</td><td>integer</td></tr></table>
</div></body></html>"""
)
# As psql's options: a list of flags, each with a few words.
OPTIONS = (
    """<html><head><title>tool</title></head><body><h1>tool</h1><p>The options of the tool.</p><dl>"""
    + "".join(
        f"<dt><code>-{c}</code></dt><dd><p>Sets <code>{c.upper()}</code> to on.</p></dd>" for c in "abcdefghijklmnop"
    )
    + "</dl></body></html>"
)
# A module's page with hardly a sentence.
SHORT = """# heapq.merge

```python
>>> from heapq import merge
>>> list(merge([1, 4], [2, 3]))
[1, 2, 3, 4]
```

Merges sorted inputs.
"""
# Markup, names and code in a short page: py3langid takes some of these for no language at all ("zxx") or for a rare one.
RMI = """# `java.rmi`

* [`Remote`](java/rmi/Remote.md) `<T>`
* [`Naming.lookup`](java/rmi/Naming.md#lookup)

```java
Registry r = LocateRegistry.getRegistry(1099);
Hello h = (Hello) r.lookup("Hello"); h.sayHello();
```

    rmic -v1.2 -d out hello.HelloImpl

See <https://docs.oracle.com/javase/8/docs/technotes/guides/rmi/>.
"""
GERMAN = "Die Kinder spielen am Nachmittag am Fluss, und niemand ruft sie nach Hause, bevor es dunkel wird.\n" * 3
CODE = '''"""Adds numbers."""


def add(a: int, b: int) -> int:
    """Returns the sum of two numbers."""
    return a + b
'''
