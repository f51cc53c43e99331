// Package lint checks the project's rules that a program can check: which packages a package may import, what it may be
// called, how long its files and lines may be, what must be documented. `go test ./internal/lint` applies the rules to
// the whole module within two seconds, without network or build. Each finding says what is wrong and what to do
// instead. For each rule the tests have a planted fault that the rule must find.
//
// A new package needs a row in the table directions of table.go, which lists the packages that it may import.
package lint

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"sort"
	"strings"
)

// File is one Go source file.
type File struct {
	// Path is relative to the module's root, with slashes.
	Path string
	Src  []byte
	AST  *ast.File
	// Test is set for files whose name ends with _test.go.
	Test bool
}

// Package is the set of Go files in one folder, including tests and files of all build tags.
type Package struct {
	// Dir is relative to the module's root, "." for the root itself.
	Dir   string
	Files []*File
}

// Tree is the module's source.
type Tree struct {
	Fset *token.FileSet
	// Packages are sorted by folder.
	Packages []*Package
	// Broken lists the files that could not be parsed.
	Broken []Finding
	// Modules maps the folder of each go.mod to the file's text.
	Modules map[string][]byte
}

// Finding is a violation of a rule.
type Finding struct {
	// Where is path:line.
	Where string
	Rule  string
	// What says what is wrong and what to do instead.
	What string
}

func (f Finding) String() string { return fmt.Sprintf("%s: [%s] %s", f.Where, f.Rule, f.What) }

// Load parses the Go files of the module at the root of fsys, and of the modules below it, and reads their go.mod
// files. It skips hidden folders, testdata, bin and data. A file that does not parse is no error: it is listed in
// Tree.Broken, so that the rules are applied to the others.
//
// Errors: a file or folder cannot be read.
func Load(fsys fs.FS) (*Tree, error) {
	t := &Tree{Fset: token.NewFileSet(), Modules: map[string][]byte{}}
	byDir := map[string]*Package{}
	err := fs.WalkDir(fsys, ".", func(p string, d fs.DirEntry, err error) error {
		name := path.Base(p)
		switch {
		case err != nil:
			return err
		case d.IsDir() && p != "." && (name[0] == '.' || name[0] == '_' || name == "testdata" || p == "bin" ||
			p == "data"):
			return fs.SkipDir
		case d.IsDir() || !d.Type().IsRegular():
			return nil
		case name == "go.mod":
			t.Modules[path.Dir(p)], err = fs.ReadFile(fsys, p)
			return err
		case path.Ext(p) != ".go" || name[0] == '.':
			return nil
		}
		src, err := fs.ReadFile(fsys, p)
		if err != nil {
			return err
		}
		f, err := parser.ParseFile(t.Fset, p, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Broken = append(t.Broken, Finding{Where: p, Rule: "parse", What: err.Error()})
			return nil
		}
		pkg := byDir[path.Dir(p)]
		if pkg == nil {
			pkg = &Package{Dir: path.Dir(p)}
			byDir[pkg.Dir] = pkg
			t.Packages = append(t.Packages, pkg)
		}
		pkg.Files = append(pkg.Files, &File{Path: p, Src: src, AST: f, Test: strings.HasSuffix(p, "_test.go")})
		return nil
	})
	slices.SortFunc(t.Packages, func(a, b *Package) int { return strings.Compare(a.Dir, b.Dir) })
	return t, err
}

// Rule is one of the checks.
type Rule struct {
	Name string
	// Check reports violations of the rule.
	Check func(t *Tree, report Reporter)
}

// Reporter takes a finding at a position. where is a token.Pos, or a path that stands for the whole file.
type Reporter func(where any, format string, args ...any)

// Rules lists all rules.
var Rules = []Rule{
	{"parse", func(*Tree, Reporter) {}}, // reported by Load
	{"gofmt", checkGofmt},
	{"pure", checkPure},
	{"time", checkTime},
	{"goroutine", checkGoroutine},
	{"cgo", checkCgo},
	{"unsafe", checkUnsafe},
	{"direction", checkDirection},
	{"dependency", checkDependency},
	{"name", checkName},
	{"size", checkSize},
	{"width", checkWidth},
	{"package-comment", checkPackageComment},
	{"doc", checkDoc},
	{"doc-name", checkDocName},
	{"mark", checkMark},
}

// Check applies all rules and returns the findings sorted by position.
func Check(t *Tree) []Finding {
	out := slices.Clone(t.Broken)
	for _, r := range Rules {
		r.Check(t, func(where any, format string, args ...any) {
			f := Finding{Rule: r.Name, What: fmt.Sprintf(format, args...)}
			switch w := where.(type) {
			case string:
				f.Where = w
			case token.Pos:
				p := t.Fset.Position(w)
				f.Where = fmt.Sprintf("%s:%d", p.Filename, p.Line)
			}
			out = append(out, f)
		})
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].Where < out[j].Where })
	return out
}

// files calls do for each file in the packages whose folder satisfies keep; tests says whether test files are included.
func (t *Tree) files(tests bool, keep func(dir string) bool, do func(p *Package, f *File)) {
	for _, p := range t.Packages {
		if !keep(p.Dir) {
			continue
		}
		for _, f := range p.Files {
			if tests || !f.Test {
				do(p, f)
			}
		}
	}
}

func everywhere(string) bool { return true }

// importPath returns the path of an import without quotes.
func importPath(i *ast.ImportSpec) string { return strings.Trim(i.Path.Value, "`\"") }

// under reports whether p is the package or folder root, or below it.
func under(p, root string) bool { return p == root || strings.HasPrefix(p, root+"/") }

// buildLine is the file's build constraint, "" without one.
func (f *File) buildLine() string {
	for line := range bytes.Lines(f.Src) {
		if bytes.HasPrefix(line, []byte("//go:build ")) {
			return string(line)
		}
		if bytes.HasPrefix(line, []byte("package ")) {
			break
		}
	}
	return ""
}
