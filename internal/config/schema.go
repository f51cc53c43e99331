package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
)

var (
	bytesType    = reflect.TypeFor[Bytes]()
	durationType = reflect.TypeFor[time.Duration]()
)

// field is one key of a struct, as its tags describe it.
type field struct {
	key      string
	index    int
	typ      reflect.Type
	def      string
	hasDef   bool
	required bool
	optional bool // left out of the effective configuration when empty
	live     bool
	oneof    []string
	min, max string
}

// fieldsOf returns the keys of a struct type in the order of the source.
func fieldsOf(t reflect.Type) []field {
	var out []field
	for i := range t.NumField() {
		sf := t.Field(i)
		tag, ok := sf.Tag.Lookup("yaml")
		if !ok {
			continue
		}
		f := field{index: i, typ: sf.Type, min: sf.Tag.Get("min"), max: sf.Tag.Get("max")}
		var options string
		f.key, options, _ = strings.Cut(tag, ",")
		f.optional = options == "omitempty"
		f.def, f.hasDef = sf.Tag.Lookup("default")
		f.required = sf.Tag.Get("required") == "true"
		f.live = sf.Tag.Get("reload") == "live"
		if s := sf.Tag.Get("oneof"); s != "" {
			f.oneof = strings.Split(s, "|")
		}
		out = append(out, f)
	}
	return out
}

func keysOf(t reflect.Type) []string {
	var keys []string
	for _, f := range fieldsOf(t) {
		keys = append(keys, f.key)
	}
	return keys
}

// typeName says what a field holds, in the reader's words.
func typeName(t reflect.Type) string {
	switch {
	case t == bytesType:
		return "size"
	case t == durationType:
		return "duration"
	}
	switch t.Kind() {
	case reflect.String:
		return "string"
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64, reflect.Uint32:
		return "whole number"
	case reflect.Float64:
		return "number"
	case reflect.Struct:
		return "mapping"
	case reflect.Pointer:
		return typeName(t.Elem())
	case reflect.Slice:
		return "list"
	}
	panic("config: schema with a field of type " + t.String())
}

func isScalar(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Struct, reflect.Pointer, reflect.Slice:
		return false
	}
	return true
}

// fill sets a struct's defaults, and those of the structs in it.
func fill(v reflect.Value) {
	for _, f := range fieldsOf(v.Type()) {
		fv := v.Field(f.index)
		switch {
		case f.typ.Kind() == reflect.Struct:
			fill(fv)
		case f.hasDef:
			if err := setText(fv, f, f.def); err != nil {
				panic(fmt.Sprintf("config: default of %s: %v", f.key, err))
			}
		}
	}
}

// setText sets a scalar from its text and checks it against the field's tags.
func setText(v reflect.Value, f field, text string) error {
	bad := func() error {
		return fmt.Errorf("%q is not allowed; allowed: %s", text, allowed(f))
	}
	for i, s := range f.oneof {
		if s == text {
			break
		}
		if i == len(f.oneof)-1 {
			if why := notBuiltIn[f.key+"="+text]; why != "" {
				return fmt.Errorf("%s; allowed: %s", why, allowed(f))
			}
			return bad()
		}
	}
	switch {
	case f.typ == bytesType:
		n, err := ParseBytes(text)
		if err != nil {
			return err
		}
		v.SetInt(int64(n))
	case f.typ == durationType:
		d, err := parseDuration(text)
		if err != nil {
			return err
		}
		v.SetInt(int64(d))
	case f.typ.Kind() == reflect.String:
		v.SetString(text)
	case f.typ.Kind() == reflect.Bool:
		if text != "true" && text != "false" {
			return bad()
		}
		v.SetBool(text == "true")
	case f.typ.Kind() == reflect.Float64:
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return bad()
		}
		v.SetFloat(x)
	case f.typ.Kind() == reflect.Uint32:
		n, err := strconv.ParseUint(text, 0, 32)
		if err != nil {
			return bad()
		}
		v.SetUint(n)
	default:
		n, err := strconv.ParseInt(text, 0, 64)
		if err != nil {
			return bad()
		}
		v.SetInt(n)
	}
	if below(v, f, f.min) || above(v, f, f.max) {
		return fmt.Errorf("%s is out of range; allowed: %s", text, allowed(f))
	}
	return nil
}

// notBuiltIn explains values that the design knows and this build does not have.
var notBuiltIn = map[string]string{
	"backend=spdk": "backend spdk is not built in",
}

func below(v reflect.Value, f field, limit string) bool {
	return limit != "" && compare(v, f, limit) < 0
}

func above(v reflect.Value, f field, limit string) bool {
	return limit != "" && compare(v, f, limit) > 0
}

// compare returns the sign of v minus the limit, which is text of v's type.
func compare(v reflect.Value, f field, limit string) int {
	l := reflect.New(f.typ).Elem()
	if err := setText(l, field{key: f.key, typ: f.typ}, limit); err != nil {
		panic(fmt.Sprintf("config: limit of %s: %v", f.key, err))
	}
	cmp := func(less, more bool) int {
		switch {
		case less:
			return -1
		case more:
			return 1
		}
		return 0
	}
	switch f.typ.Kind() {
	case reflect.Uint32:
		return cmp(v.Uint() < l.Uint(), v.Uint() > l.Uint())
	case reflect.Float64:
		// Written so that not-a-number is below every limit.
		return cmp(!(v.Float() >= l.Float()), v.Float() > l.Float())
	}
	return cmp(v.Int() < l.Int(), v.Int() > l.Int())
}

// allowed says what a field may hold.
func allowed(f field) string {
	switch {
	case len(f.oneof) > 0:
		return strings.Join(f.oneof, ", ")
	case f.min != "" && f.max != "":
		return f.min + " to " + f.max
	case f.min != "":
		return f.min + " or more"
	case f.typ == bytesType:
		return bytesAllowed
	case f.typ == durationType:
		return durationAllowed
	case f.typ.Kind() == reflect.Bool:
		return "true, false"
	case f.typ.Kind() == reflect.Slice:
		return "a list of " + typeName(f.typ.Elem()) + "s"
	}
	return "a " + typeName(f.typ)
}
