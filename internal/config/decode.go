package config

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// decoder puts a parsed file into the structs. The library's own strict decoding
// stops at the first error; this one walks the library's syntax tree, so that it
// finds all of them and remembers where each field stands.
type decoder struct {
	file     string
	pos      positions
	problems Errors
	// bad holds the paths whose value could not be used; validation leaves them alone.
	bad map[string]bool
}

func (d *decoder) problem(at position, path, format string, args ...any) {
	if d.bad == nil {
		d.bad = map[string]bool{}
	}
	d.bad[path] = true
	d.problems = append(d.problems, &Problem{File: at.file, Line: at.line, Column: at.column, Field: path,
		Reason: fmt.Sprintf(format, args...)})
}

func (d *decoder) at(t *token.Token) position {
	if t == nil || t.Position == nil {
		return position{file: d.file}
	}
	return position{d.file, t.Position.Line, t.Position.Column}
}

// document decodes a whole file; false means that it is no YAML at all.
func (d *decoder) document(data []byte, c *Config) bool {
	fill(reflect.ValueOf(c).Elem())
	text, err := plainText(data)
	if err != nil {
		d.problem(position{file: d.file}, "", "%v", err)
		return false
	}
	tokens := lexer.Tokenize(string(text))
	if t, what := tooComplex(tokens); t != nil {
		d.problem(d.at(t), "", "%s", what)
		return false
	}
	f, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		var syntax *yaml.SyntaxError
		if errors.As(err, &syntax) {
			d.problem(d.at(syntax.Token), "", "not valid YAML: %s", syntax.Message)
		} else {
			d.problem(position{file: d.file}, "", "not valid YAML: %v", err)
		}
		return false
	}
	var docs []*ast.DocumentNode
	for _, doc := range f.Docs {
		if doc.Body != nil {
			docs = append(docs, doc)
		}
	}
	if len(docs) > 1 {
		d.problem(d.at(docs[1].Body.GetToken()), "", "a second YAML document; allowed: one")
	}
	if len(docs) > 0 {
		d.value(docs[0].Body, reflect.ValueOf(c).Elem(), field{typ: reflect.TypeFor[Config]()}, "")
	}
	return true
}

// value decodes one node into v.
func (d *decoder) value(n ast.Node, v reflect.Value, f field, path string) {
	at := d.nodePosition(n)
	if _, ok := d.pos[path]; !ok || isScalar(f.typ) {
		d.pos[path] = at
	}
	wrong := func(what string) {
		d.problem(at, path, "%s; allowed: %s", what, allowed(f))
	}
	switch n := n.(type) {
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		d.problem(at, path, "anchors, aliases and tags are not read; write the value out")
	case *ast.NullNode:
		if isScalar(f.typ) {
			wrong("it is empty")
		}
	case ast.MapNode:
		switch f.typ.Kind() {
		case reflect.String:
			text, ok := joined(n)
			if !ok {
				wrong("it is a mapping")
			} else if err := setText(v, f, text); err != nil {
				d.problem(at, path, "%v", err)
			}
		case reflect.Struct:
			d.mapping(n, v, path)
		case reflect.Pointer:
			p := reflect.New(f.typ.Elem())
			fill(p.Elem())
			d.mapping(n, p.Elem(), path)
			v.Set(p)
		default:
			wrong("it is a mapping")
		}
	case *ast.SequenceNode:
		if f.typ.Kind() != reflect.Slice {
			wrong("it is a list")
			return
		}
		elem := field{key: f.key, typ: f.typ.Elem()}
		if len(n.Values) == 0 {
			return // an empty list is the same as none
		}
		s := reflect.MakeSlice(f.typ, len(n.Values), len(n.Values))
		for i, item := range n.Values {
			if elem.typ.Kind() == reflect.Struct {
				fill(s.Index(i))
			}
			d.value(item, s.Index(i), elem, index(path, i))
		}
		v.Set(s)
	default:
		if !isScalar(f.typ) {
			wrong(fmt.Sprintf("it is %q", n.GetToken().Value))
			return
		}
		if text, ok := d.scalar(n, f, wrong); ok {
			if err := setText(v, f, text); err != nil {
				d.problem(at, path, "%v", err)
			}
		}
	}
}

// joined undoes what the library does to a:b in a list in braces, as in
// {hosts: [nqn.2026-11.example.host:a]}: it takes that for the mapping {a: b},
// although YAML wants a space after the colon for it.
func joined(n ast.MapNode) (string, bool) {
	it := n.MapRange()
	if !it.Next() {
		return "", false
	}
	key, value := it.Key().GetToken(), it.Value()
	if _, ok := value.(ast.ScalarNode); !ok || it.Next() {
		return "", false
	}
	v := value.GetToken()
	adjacent := v.Position.Line == key.Position.Line && v.Position.Column == key.Position.Column+
		utf8.RuneCountInString(key.Value)+1
	return key.Value + ":" + v.Value, adjacent
}

// scalar returns a node's text if YAML gives it the type that the field wants.
func (d *decoder) scalar(n ast.Node, f field, wrong func(string)) (string, bool) {
	text := n.GetToken().Value
	kind := f.typ.Kind()
	number := kind != reflect.String && kind != reflect.Bool
	switch n := n.(type) {
	case *ast.StringNode:
		if kind == reflect.String || f.typ == bytesType || f.typ == durationType {
			return text, true
		}
		wrong(fmt.Sprintf("it is the string %q", text))
	case *ast.LiteralNode:
		if kind == reflect.String {
			return n.Value.Value, true
		}
		wrong("it is a block of text")
	case *ast.BoolNode:
		if kind == reflect.Bool {
			return text, true
		}
		wrong("it is " + text + ", which YAML reads as true or false")
	case *ast.IntegerNode:
		if number {
			return text, true
		}
		if kind == reflect.String {
			wrong("it is the number " + text + " (quotes make it text)")
		} else {
			wrong("it is the number " + text)
		}
	case *ast.FloatNode:
		if kind == reflect.Float64 {
			return text, true
		}
		wrong("it is the number " + text)
	default:
		wrong(fmt.Sprintf("it is %q", text))
	}
	return "", false
}

func (d *decoder) mapping(n ast.MapNode, v reflect.Value, path string) {
	fields := map[string]field{}
	for _, f := range fieldsOf(v.Type()) {
		fields[f.key] = f
	}
	seen := map[string]position{}
	for it := n.MapRange(); it.Next(); {
		tok := it.Key().GetToken()
		at, key := d.at(tok), tok.Value
		p := join(path, key)
		if _, isMerge := it.Key().(*ast.MergeKeyNode); isMerge {
			d.problem(at, p, "anchors, aliases and tags are not read; write the value out")
			continue
		}
		if first, ok := seen[key]; ok {
			d.problem(at, p, "given twice, first at line %d; allowed: once", first.line)
			continue
		}
		seen[key] = at
		f, ok := fields[key]
		if !ok {
			d.problem(at, p, "unknown key; allowed: %s", strings.Join(keysOf(v.Type()), ", "))
			continue
		}
		d.pos[p] = at
		d.value(it.Value(), v.Field(f.index), f, p)
	}
	for _, f := range fieldsOf(v.Type()) {
		if _, ok := seen[f.key]; !ok && f.required {
			d.problem(d.pos.of(d.file, path), join(path, f.key), "missing; it is required: a %s", typeName(f.typ))
		}
	}
}

// nodePosition is where a reader would point: a mapping at its first key.
func (d *decoder) nodePosition(n ast.Node) position {
	if m, ok := n.(ast.MapNode); ok {
		if it := m.MapRange(); it.Next() {
			return d.at(it.Key().GetToken())
		}
	}
	if n == nil {
		return position{file: d.file}
	}
	return d.at(n.GetToken())
}

// envPrefix begins the environment variables that the configuration knows.
const envPrefix = "JBOFD_"

// env applies JBOFD_SECTION_KEY variables.
func (d *decoder) env(environ []string, c *Config) {
	root := reflect.ValueOf(c).Elem()
	for _, kv := range environ {
		name, text, _ := strings.Cut(kv, "=")
		rest, ok := strings.CutPrefix(name, envPrefix)
		if !ok {
			continue
		}
		for _, section := range fieldsOf(root.Type()) {
			key, ok := strings.CutPrefix(rest, strings.ToUpper(section.key)+"_")
			if !ok {
				continue
			}
			at := position{file: "environment " + name}
			if section.typ.Kind() != reflect.Struct {
				what := "a list"
				if section.typ.Kind() == reflect.Pointer {
					what = "a section that may be absent"
				}
				d.problem(at, "", "unknown variable; allowed: none, because %s is %s, which only the file has",
					section.key, what)
				continue
			}
			var names []string
			found := false
			for _, f := range fieldsOf(section.typ) {
				if !isScalar(f.typ) {
					continue
				}
				names = append(names, EnvName(section.key, f.key))
				if strings.ToUpper(f.key) != key {
					continue
				}
				found = true
				path := join(section.key, f.key)
				d.pos[path] = at
				if !utf8.ValidString(text) {
					d.problem(at, path, "%q is not UTF-8; allowed: UTF-8", text)
				} else if err := setText(root.Field(section.index).Field(f.index), f, text); err != nil {
					d.problem(at, path, "%v", err)
				}
			}
			if !found {
				d.problem(at, "", "unknown variable; allowed: %s", strings.Join(names, ", "))
			}
		}
	}
}

// EnvName returns the environment variable that replaces a section's scalar key.
func EnvName(section, key string) string {
	return envPrefix + strings.ToUpper(section) + "_" + strings.ToUpper(key)
}
