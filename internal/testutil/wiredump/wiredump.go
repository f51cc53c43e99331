// Package wiredump lays bare a wire format for golden tests: it finds a view's fields by
// what its setters touch, and prints bytes with the names and values of the fields they belong
// to, so that a diff of a golden file reads as prose.
//
//	0000  01                                               CNS = 1
//	0002  34 12                                            CNTID = 4660
//	0004  00 ...                                           28 zeroes
//
// A view is a pointer to a byte array with methods X() T and SetX(T); those of T int are counts
// or bases of another field's bytes and are left out.
package wiredump

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"sort"
	"strings"
)

// Field is one field of a view, as its setter shows it.
type Field struct {
	Name string
	// Off is the first byte, Len the number of bytes its setter touches.
	Off, Len int
	// Bits is the mask of bits that the setter touches, Len bytes.
	Bits []byte

	get, set int // method indexes
}

// Fields returns the fields of the view's type in the order of their place. The view's
// bytes are left alone.
func Fields(view any) []Field {
	t := reflect.TypeOf(view)
	var out []Field
	for i := range t.NumMethod() {
		name, ok := strings.CutPrefix(t.Method(i).Name, "Set")
		g, found := t.MethodByName(name)
		if !ok || !found || g.Type.NumIn() != 1 || g.Type.NumOut() != 1 ||
			t.Method(i).Type.NumIn() != 2 || t.Method(i).Type.In(1) != g.Type.Out(0) ||
			g.Type.Out(0).Kind() == reflect.Int {
			continue
		}
		f := Field{Name: name, get: g.Index, set: i}
		v := reflect.New(t.Elem())
		fill(v, 0)
		v.Method(i).Call([]reflect.Value{ones(g.Type.Out(0))})
		lit := append([]byte(nil), Bytes(v.Interface())...)
		fill(v, 0xff)
		v.Method(i).Call([]reflect.Value{reflect.Zero(g.Type.Out(0))})
		cleared := Bytes(v.Interface())
		first, last := -1, -1
		mask := make([]byte, len(lit))
		for j := range lit {
			mask[j] = lit[j] | ^cleared[j]
			if mask[j] != 0 {
				if first < 0 {
					first = j
				}
				last = j
			}
		}
		if first < 0 {
			continue
		}
		f.Off, f.Len, f.Bits = first, last-first+1, mask[first:last+1]
		out = append(out, f)
	}
	sort.SliceStable(out, func(i, j int) bool {
		if out[i].Off != out[j].Off {
			return out[i].Off < out[j].Off
		}
		return out[i].Len < out[j].Len
	})
	return out
}

// Get calls the field's getter on a view of the same type.
func (f Field) Get(view any) any {
	return reflect.ValueOf(view).Method(f.get).Call(nil)[0].Interface()
}

// Set calls the field's setter on a view of the same type.
func (f Field) Set(view, value any) {
	reflect.ValueOf(view).Method(f.set).Call([]reflect.Value{reflect.ValueOf(value)})
}

// Bytes returns the view's bytes, not a copy.
func Bytes(view any) []byte {
	v := reflect.ValueOf(view).Elem()
	return v.Slice(0, v.Len()).Bytes()
}

func fill(v reflect.Value, b byte) {
	all := Bytes(v.Interface())
	for i := range all {
		all[i] = b
	}
}

// ones is the value of type t with all bits set, or a text longer than any field.
func ones(t reflect.Type) reflect.Value {
	v := reflect.New(t).Elem()
	switch t.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(math.MaxUint64 >> (64 - t.Bits()))
	case reflect.String:
		v.SetString(strings.Repeat("~", 512))
	case reflect.Array:
		for i := range t.Len() {
			v.Index(i).Set(ones(t.Elem()))
		}
	case reflect.Struct:
		for i := range t.NumField() {
			v.Field(i).Set(ones(t.Field(i).Type))
		}
	default:
		panic(fmt.Sprintf("wiredump: no value of all ones for %v", t))
	}
	return v
}

// Layout lists the fields: offset, length, bits where they do not fill their bytes, name.
func Layout(view any) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d bytes\n", len(Bytes(view)))
	for _, f := range Fields(view) {
		bits := ""
		if bytes.Count(f.Bits, []byte{0xff}) != f.Len {
			bits = fmt.Sprintf("  bits %x", f.Bits)
		}
		fmt.Fprintf(&b, "%4d %3d  %s%s\n", f.Off, f.Len, f.Name, bits)
	}
	return b.String()
}

// Dump prints the view's bytes with the fields they belong to. Bytes of no field stand
// alone; runs of zeroes among them are counted.
func Dump(view any) string {
	var out strings.Builder
	all := Bytes(view)
	at := 0
	fields := Fields(view)
	for i := 0; i < len(fields); {
		f := fields[i]
		Raw(&out, all, at, f.Off)
		end := f.Off + f.Len
		var notes []string
		for i < len(fields) && fields[i].Off < end {
			end = max(end, fields[i].Off+fields[i].Len)
			notes = append(notes, fmt.Sprintf("%s = %v", fields[i].Name, show(fields[i].Get(view))))
			i++
		}
		Lines(&out, all, f.Off, end, strings.Join(notes, ", "))
		at = end
	}
	Raw(&out, all, at, len(all))
	return out.String()
}

func show(v any) string {
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.String:
		return fmt.Sprintf("%q", v)
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if s, ok := v.(fmt.Stringer); ok {
			return s.String()
		}
		if r.Uint() > 9 {
			return fmt.Sprintf("%d (%#x)", r.Uint(), r.Uint())
		}
	}
	return fmt.Sprint(v)
}

// Raw prints bytes from to to of b, which belong to no field.
func Raw(out *strings.Builder, b []byte, from, to int) {
	for from < to {
		n := from
		for n < to && b[n] == 0 {
			n++
		}
		if n-from >= 4 || n == to && n > from {
			Lines(out, b[:min(n, from+1)], from, from+1, fmt.Sprintf("%d zeroes", n-from))
			from = n
			continue
		}
		n = from
		for n < to && (b[n] != 0 || bytes.IndexFunc(b[n:min(n+4, to)], func(r rune) bool { return r != 0 }) >= 0) {
			n++
		}
		n = max(n, from+1)
		Lines(out, b, from, n, "")
		from = n
	}
}

// Lines prints bytes from to to of b, 16 a line, with a note on the first.
func Lines(out *strings.Builder, b []byte, from, to int, note string) {
	for at := from; at < to; at += 16 {
		if at > from && to-at > 16 && len(bytes.TrimLeft(b[at:to], "\x00")) == 0 {
			fmt.Fprintf(out, "%04x  %-48s %d zeroes\n", at, "00", to-at)
			return
		}
		end := min(at+16, to)
		line := fmt.Sprintf("%04x  %-48s %s", at, fmt.Sprintf("% x", b[at:end]), note)
		out.WriteString(strings.TrimRight(line, " ") + "\n")
		note = ""
	}
}
