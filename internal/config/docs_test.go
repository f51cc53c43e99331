package config

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// fieldComments returns the comments of all struct fields in config.go, by type
// and field name.
func fieldComments(t *testing.T) map[string]string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		ts, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if st, ok := ts.Type.(*ast.StructType); ok {
			for _, field := range st.Fields.List {
				for _, name := range field.Names {
					out[ts.Name.Name+"."+name.Name] = strings.Join(strings.Fields(field.Doc.Text()), " ")
				}
			}
		}
		return true
	})
	return out
}

const docsHead = `# Configuration

<!-- Made from internal/config by "go test ./internal/config -update"; a test holds it to the code. -->

jbofd reads one YAML file: ` + "`jbofd --config FILE`" + `. ` + "`jbofd --demo`" + ` runs an embedded demonstration, which is
configs/demo.yaml. ` + "`jbofd validate FILE`" + ` checks a file without starting (` + "`-`" + ` is standard input), and
` + "`jbofd --config FILE --print-effective-config`" + ` shows it with every default filled in. configs/jbofd.yaml is a
commented example.

Reading is strict. An unknown key, a key given twice, a wrong type, a value out of range, two parts that contradict each
other, or more than the machine has are errors. All of them are reported at once, each with file, line, column, field
and what is allowed:

` + "```" + `
jbofd.yaml:4:49: ssds[0].engine: "fast" is not allowed; allowed: auto, io_uring, threads
` + "```" + `

* **Sizes** are whole numbers of bytes, bare or with KiB, MiB, GiB or TiB: ` + "`4096`, `8GiB`" + `.
  **Durations** have a unit: ` + "`30s`, `2m`" + `.
* **Addresses** are IP:port: ` + "`0.0.0.0:4420`, `\"[::1]:4420\"`" + ` (quoted, because of the brackets). Host names are not
  resolved.
* **Names** have 1 to 63 letters, digits, ` + "`.`, `_` and `-`" + `.
* Anchors, aliases and tags of YAML are not read. The file is UTF-8, at most 8 MiB, and nests at most 32 levels.

**Environment.** A variable JBOFD_SECTION_KEY replaces a scalar key of a section: ` + "`JBOFD_LOG_LEVEL=debug`" + `,
` + "`JBOFD_LIMITS_BUFFERS=64MiB`" + `. Lists are in the file only. A variable that begins with JBOFD_ and a
section and names no such key is an error.

**Reload.** On SIGHUP, or when ` + "`jbofctl reload`" + ` asks, the daemon reads the file again. Keys whose column *Change*
says live change without a restart: the log level, referrals, tenants with their hosts, weights and limits, subsystems
added and removed, allowed hosts, namespaces added, removed, resized, and shown to other hosts. If anything else
differs, or the file has an error, nothing changes; the log says which field needs a restart, with its line.
` + "`jbofctl reload --dry-run`" + ` says beforehand what a reload would change or why it would be refused. A block
namespace does not shrink, and no namespace moves to another drive under its nsid: a daemon that finds it on another
drive at its start, because the drives' paths have been exchanged, does not start. Removing a namespace from the
configuration keeps its data and its space on the drive; adding it again brings them back, and
` + "`jbofctl namespace delete`" + ` erases the data and frees the space.

**Tenants.** A tenant's limits hold at each drive separately: a tenant with rw_ios_per_sec 1000 and namespaces on two
drives gets 1000 at each. Their names and units are those of SPDK's bdev_set_qos_limit; a megabyte is 1024 × 1024 bytes
there and here. In any second a tenant exceeds its limit by at most 20 ms' worth and one command. See "Sharing a drive"
in [operations.md](operations.md).

**Memory.** What hosts can make the daemon hold is at most
limits.buffers + limits.connections × (limits.receive_buffer + about 256 bytes × limits.queue_depth), and much less in
practice, because memory is taken when it is used. Data, also data in capsules, is kept in limits.buffers; when all of
it is taken, the daemon stops reading from the hosts that wait for more. limits.buffers and the drives in memory must
fit the memory of the machine, or of the daemon's control group.

`

// meaning turns a field's comment into the text of the table: it leaves out the Go name.
func meaning(comment, name string) string {
	rest := strings.TrimPrefix(comment, name+" ")
	rest = strings.TrimPrefix(strings.TrimPrefix(rest, "is "), "are ")
	return strings.ToUpper(rest[:1]) + rest[1:]
}

// section writes the table of one struct, then those of the structs in it. change
// is what the last column says of keys that are not live themselves.
func section(b *strings.Builder, t reflect.Type, path, title, change string, comments map[string]string) {
	fmt.Fprintf(b, "## %s\n\n| Key | Type | Default | Allowed | Change | Meaning |\n|---|---|---|---|---|---|\n", title)
	type sub struct {
		t                   reflect.Type
		path, title, change string
	}
	var subs []sub
	for _, f := range fieldsOf(t) {
		typ, what, mark := f.typ, typeName(f.typ), ""
		switch typ.Kind() {
		case reflect.Slice:
			typ = typ.Elem()
			what, mark = "list of "+typeName(typ)+"s", "[]"
		case reflect.Pointer:
			typ = typ.Elem()
		}
		state := change
		if f.live {
			state = "live"
		}
		if typ.Kind() == reflect.Struct {
			s := sub{typ, path + f.key + mark + ".", "`" + path + f.key + mark + "`", state}
			if typ == reflect.TypeFor[Namespace]() {
				s.change = "another namespace"
			}
			if typ == reflect.TypeFor[KV]() {
				s.change, state = "restart", "restart"
			}
			subs = append(subs, s)
			if path == "" && !f.live {
				state = "see below"
			}
		}
		def := ""
		switch {
		case f.required:
			def = "**required**"
		case f.hasDef:
			def = "`" + f.def + "`"
		case typ.Kind() != reflect.Struct:
			def = "none"
		}
		allow := ""
		if len(f.oneof) > 0 || f.min != "" {
			allow = allowed(f)
		}
		name := t.Field(f.index).Name
		fmt.Fprintf(b, "| `%s` | %s | %s | %s | %s | %s |\n", f.key, what, def, allow, state,
			meaning(comments[t.Name()+"."+name], name))
	}
	b.WriteString("\n")
	for _, s := range subs {
		section(b, s.t, s.path, s.title, s.change, comments)
	}
}

func TestTheDocumentationIsWhatTheCodeDoes(t *testing.T) {
	comments := fieldComments(t)
	var b strings.Builder
	b.WriteString(docsHead)
	section(&b, reflect.TypeFor[Config](), "", "Sections", "restart", comments)
	golden(t, "../../docs/configuration.md", strings.TrimRight(b.String(), "\n")+"\n")
}

func TestEveryKeyHasAComment(t *testing.T) {
	comments := fieldComments(t)
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for _, f := range fieldsOf(typ) {
			name := typ.Name() + "." + typ.Field(f.index).Name
			if comments[name] == "" || strings.Contains(comments[name], "|") {
				t.Errorf("%s: comment %q", name, comments[name])
			}
			sub := f.typ
			if k := sub.Kind(); k == reflect.Slice || k == reflect.Pointer {
				sub = sub.Elem()
			}
			if sub.Kind() == reflect.Struct {
				walk(sub)
			}
		}
	}
	walk(reflect.TypeFor[Config]())
}

func TestTheExampleConfigurationsAreValid(t *testing.T) {
	files, err := filepath.Glob("../../configs/*.yaml")
	clusters, err2 := filepath.Glob("../../deploy/cluster/*.yaml")
	boxes, err3 := filepath.Glob("../../deploy/jbof/*.yaml")
	if err != nil || err2 != nil || err3 != nil || len(files) < 3 || len(clusters) < 2 || len(boxes) < 2 {
		t.Fatalf("%d, %d and %d examples, %v, %v, %v", len(files), len(clusters), len(boxes), err, err2, err3)
	}
	files = slices.Concat(files, clusters, boxes)
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(f, data); err != nil {
			t.Error(err)
		}
	}
}

func TestTheDemoFileIsTheEmbeddedDefault(t *testing.T) {
	data, err := os.ReadFile("../../configs/demo.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if string(data) != string(DefaultYAML()) {
		t.Error("configs/demo.yaml differs from internal/config/demo.yaml: copy it over")
	}
}

// The commented example shows every key with its default, so that it can be read
// instead of the documentation.
func TestTheCommentedExampleNamesEveryKey(t *testing.T) {
	data, err := os.ReadFile("../../configs/jbofd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for _, f := range fieldsOf(typ) {
			if !strings.Contains(string(data), f.key+":") {
				t.Errorf("configs/jbofd.yaml does not show %s", f.key)
			}
			sub := f.typ
			if k := sub.Kind(); k == reflect.Slice || k == reflect.Pointer {
				sub = sub.Elem()
			}
			if sub.Kind() == reflect.Struct {
				walk(sub)
			}
			if typ == reflect.TypeFor[Limits]() && !strings.Contains(string(data), f.key+": "+f.def) {
				t.Errorf("configs/jbofd.yaml does not show the default of limits.%s, %s", f.key, f.def)
			}
		}
	}
	walk(reflect.TypeFor[Config]())
}

// TestDocumentsAgreeThatRemovingANamespaceKeepsItsData: two pages once contradicted each other.
func TestDocumentsAgreeThatRemovingANamespaceKeepsItsData(t *testing.T) {
	for page, want := range map[string]string{
		"configuration.md": "Removing a namespace from the configuration keeps its data and its space on the drive",
		"jbofctl.md":       "Removing a namespace from the configuration keeps its data and its space on the drive",
		"architecture.md":  "keeps its extent until an operator frees it",
	} {
		data, err := os.ReadFile(filepath.Join("../../docs", page))
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Join(strings.Fields(string(data)), " ")
		if !strings.Contains(text, want) {
			t.Errorf("%s does not say %q", page, want)
		}
		if strings.Contains(text, "gives its room on the drive free") {
			t.Errorf("%s says that removing a namespace frees its space", page)
		}
	}
}
